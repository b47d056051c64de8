"""Python source -> (head, relation, tail) triples, by reading its syntax tree.

Standard library only, and nothing of lowmem: `codegraph.py` also runs this file by its
path in worker processes (see ``serve``), which then start in a few hundredths of a second.

How things are named
    a module, class or function     its full dotted name: ``json.dumps``, ``json.JSONEncoder``
    an imported thing               its name at home: ``np.linalg.norm`` is ``numpy.linalg.norm``
    a built-in, or a bare name      as written: ``len``, ``callback``
    an attribute of some object     with a leading dot: ``.append``
    a parameter, keyword, variable  with an equals sign: ``axis=``
"""

from __future__ import annotations

import ast
import gc
import json
import signal
import sys
import tokenize
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

Triple = tuple[str, str, str]
_Inner = tuple[Sequence[Any], str, str]  # nodes to read next, and their scope and class

MAX_SOURCE_BYTES = 2_000_000  # generated tables, mostly; ast would take gigabytes for them

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def extract(source: str | bytes, module: str, is_package: bool = False) -> list[Triple]:
    """All distinct triples of one source file, in the order of their first appearance.

    Args:
        source: the text of the file, or its bytes (a coding line is obeyed).
        module: the dotted name it is imported by.
        is_package: True for an ``__init__.py``, where ``from . import x`` means this module.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse`` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escapes are not our user's news
        tree = ast.parse(source)
    reader = _Reader(module, is_package)
    reader.read(tree)
    return list(reader.triples)


class _Reader:
    def __init__(self, module: str, is_package: bool) -> None:
        self.module = module
        self.package = module if is_package else module.rpartition(".")[0]
        self.triples: dict[Triple, None] = {}
        self.names: dict[str, str] = {}  # what a bare name of this module stands for
        self.methods: dict[str, set[str]] = {}  # class -> names of its methods

    def add(self, head: str, relation: str, tail: str) -> None:
        self.triples[head, relation, tail] = None

    def read(self, tree: ast.Module) -> None:
        if self.module != self.package and self.package:
            self.add(self.package, "contains", self.module)
        elif "." in self.module:
            self.add(self.module.rpartition(".")[0], "contains", self.module)
        for item in tree.body:
            if isinstance(item, _SCOPE):
                self.names[item.name] = f"{self.module}.{item.name}"
        # Depth first, with an explicit stack: source nests deeper than Python's own limit.
        # Each entry carries the scope that owns it and the class whose `self` it sees.
        stack: list[tuple[ast.AST, str, str]] = [(item, self.module, "") for item in tree.body]
        stack.reverse()
        while stack:
            node, scope, owner = stack.pop()
            kind = type(node)
            visit = _VISITORS.get(kind)
            if visit is not None:
                children, scope, owner = visit(self, node, scope, owner)
            else:
                children = []
                fields = _FIELDS.get(kind)
                for name in _fields_of(kind) if fields is None else fields:
                    child = getattr(node, name, None)
                    if type(child) is list:
                        children += child
                    else:
                        children.append(child)
            for child in reversed(children):  # so that they are read in source order
                if type(child) not in _LEAVES:
                    stack.append((child, scope, owner))

    def visit_name(self, node: ast.Name, scope: str, owner: str) -> _Inner:
        self.bare_name(node, scope, owner)
        return (), scope, owner

    def visit_attribute(self, node: ast.Attribute, scope: str, owner: str) -> _Inner:
        self.attribute(node, scope, owner)
        # The chain is named as a whole; what it hangs on is still to be read.
        root: ast.AST = node
        while type(root) is ast.Attribute:
            root = root.value
        return () if type(root) is ast.Name else (root,), scope, owner

    def visit_call(self, node: ast.Call, scope: str, owner: str) -> _Inner:
        self.call(node, scope, owner)
        inner = [] if type(node.func) is ast.Name else [node.func]
        return [*inner, *node.args, *node.keywords], scope, owner

    def visit_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: str, owner: str
    ) -> _Inner:
        scope = self.function(node, scope, owner)
        return [*node.args.defaults, *node.args.kw_defaults, *node.body], scope, owner

    def visit_class(self, node: ast.ClassDef, scope: str, owner: str) -> _Inner:
        name = self.class_(node, scope, owner)
        return node.body, name, name

    def visit_import(self, node: ast.Import | ast.ImportFrom, scope: str, owner: str) -> _Inner:
        self.import_(node)
        return (), scope, owner

    def visit_raise(self, node: ast.Raise, scope: str, owner: str) -> _Inner:
        error = self.raise_(node, scope, owner)
        return [*error.args, *error.keywords] if error else (node.cause,), scope, owner

    def visit_handler(self, node: ast.ExceptHandler, scope: str, owner: str) -> _Inner:
        for name in self.type_names(node.type, owner):
            self.add(scope, "catches", name)
        return node.body, scope, owner

    def visit_annotated(self, node: ast.AnnAssign, scope: str, owner: str) -> _Inner:
        return (node.target, node.value), scope, owner

    def bare_name(self, node: ast.Name, scope: str, owner: str) -> None:
        if isinstance(node.ctx, ast.Store):
            if scope == owner:
                self.add(owner, "has_attribute", "." + node.id)
            else:
                self.add(scope, "has_variable", node.id + "=")
        elif node.id in self.names:
            self.uses(scope, self.names[node.id])

    def uses(self, scope: str, name: str) -> None:
        if (scope, "calls", name) not in self.triples:
            self.add(scope, "uses", name)

    def dotted(self, node: ast.AST | None, owner: str) -> str | None:
        """The name of an expression: resolved, ``.attribute`` of some object, or None."""
        if type(node) is ast.Name:
            return self.names.get(node.id, node.id)
        if type(node) is not ast.Attribute:
            return None
        parts = [node.attr]
        root: ast.AST = node.value
        while type(root) is ast.Attribute:
            parts.append(root.attr)
            root = root.value
        if type(root) is ast.Name:
            if root.id in ("self", "cls"):
                if len(parts) == 1 and parts[0] in self.methods.get(owner, ()):
                    return f"{owner}.{parts[0]}"
            elif root.id in self.names:
                parts.append(self.names[root.id])
                return ".".join(reversed(parts))
        return "." + parts[0]

    def type_names(self, node: ast.AST | None, owner: str) -> list[str]:
        """The named types of an annotation or an ``except`` clause, outermost first."""
        names: list[str] = []
        stack = [node]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:  # a forward reference
                    stack.append(ast.parse(node.value, mode="eval").body)
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
            elif isinstance(node, (ast.Name, ast.Attribute)):
                name = self.dotted(node, owner)
                if name is not None:
                    names.append(name)
            elif isinstance(node, ast.Subscript):
                stack += [node.slice, node.value]
            elif isinstance(node, (ast.Tuple, ast.List)):
                stack += reversed(node.elts)
            elif isinstance(node, ast.BinOp):
                stack += [node.right, node.left]
        return names

    def call(self, node: ast.Call, scope: str, owner: str) -> None:
        callee = self.dotted(node.func, owner)
        if callee is None:
            return
        self.add(scope, "calls", callee)
        for keyword in node.keywords:
            if keyword.arg is not None:
                self.add(callee, "called_with", keyword.arg + "=")

    def attribute(self, node: ast.Attribute, scope: str, owner: str) -> None:
        name = self.dotted(node, owner)
        if name is None:
            return
        if type(node.ctx) is ast.Store:
            root = node.value
            if owner and type(root) is ast.Name and root.id in ("self", "cls"):
                self.add(owner, "has_attribute", name)
            else:
                self.add(scope, "sets", name)
        else:
            self.uses(scope, name)

    def decorators(self, node: ast.AST, name: str, owner: str) -> None:
        for decorator in node.decorator_list:  # type: ignore[attr-defined]
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            decorated = self.dotted(target, owner)
            if decorated is not None:
                self.add(name, "decorated_by", decorated)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: str, owner: str) -> str:
        name = f"{scope}.{node.name}"
        if scope == self.module:
            self.names[node.name] = name
        self.add(scope, "defines_method" if scope == owner else "defines", name)
        self.decorators(node, name, owner)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                every.append(extra)
        for argument in every:
            if argument.arg not in ("self", "cls"):
                self.add(name, "has_parameter", argument.arg + "=")
            for type_name in self.type_names(argument.annotation, owner):
                self.add(name, "takes", type_name)
        for type_name in self.type_names(node.returns, owner):
            self.add(name, "returns", type_name)
        return name

    def class_(self, node: ast.ClassDef, scope: str, owner: str) -> str:
        name = f"{scope}.{node.name}"
        if scope == self.module:
            self.names[node.name] = name
        self.add(scope, "defines", name)
        self.decorators(node, name, owner)
        for base in node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            base_name = self.dotted(target, owner)
            if base_name is not None:
                self.add(name, "inherits", base_name)
        self.methods[name] = {item.name for item in node.body if isinstance(item, _FUNCTION)}
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                for type_name in self.type_names(item.annotation, owner):
                    self.add(name, "has_attribute_type", type_name)
        return name

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.add(self.module, "imports", alias.name)
                if alias.asname:
                    self.names[alias.asname] = alias.name
                else:
                    top = alias.name.partition(".")[0]
                    self.names[top] = top
            return
        source = node.module or ""
        if node.level:
            base = self.package.split(".") if self.package else []
            if node.level > 1:
                base = base[: len(base) - (node.level - 1)]
            source = ".".join([*base, source] if source else base)
        if not source:
            return
        self.add(self.module, "imports", source)
        for alias in node.names:
            if alias.name != "*":
                full = f"{source}.{alias.name}"
                self.names[alias.asname or alias.name] = full
                self.add(self.module, "imports_name", full)

    def raise_(self, node: ast.Raise, scope: str, owner: str) -> ast.Call | None:
        """Note what is raised; return the call that makes it: its arguments are still unread."""
        error = node.exc if isinstance(node.exc, ast.Call) else None
        name = self.dotted(error.func if error else node.exc, owner)
        if name is not None:
            self.add(scope, "raises", name)
        return error


# What is not read like any other node. A look-up, because there are millions of nodes.
_VISITORS: dict[type, Callable[[_Reader, Any, str, str], _Inner]] = {
    ast.Name: _Reader.visit_name,
    ast.Attribute: _Reader.visit_attribute,
    ast.Call: _Reader.visit_call,
    ast.FunctionDef: _Reader.visit_function,
    ast.AsyncFunctionDef: _Reader.visit_function,
    ast.ClassDef: _Reader.visit_class,
    ast.Import: _Reader.visit_import,
    ast.ImportFrom: _Reader.visit_import,
    ast.Raise: _Reader.visit_raise,
    ast.ExceptHandler: _Reader.visit_handler,
    ast.AnnAssign: _Reader.visit_annotated,
}
# What a field can hold that has no names inside.
_LEAVES = frozenset({type(None), str, int, bool, ast.Constant, ast.Pass, ast.Break, ast.Continue})
# Fields of a kind of node that can hold other nodes with names inside.
_FIELDS: dict[type, tuple[str, ...]] = {}
_NO_NODES = frozenset({"ctx", "op", "ops", "id", "attr", "kind", "conversion", "type_comment"})


def _fields_of(kind: type[ast.AST]) -> tuple[str, ...]:
    return _FIELDS.setdefault(kind, tuple(n for n in kind._fields if n not in _NO_NODES))


def read_source(path: str) -> bytes:
    """The bytes of a source file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than ``MAX_SOURCE_BYTES``.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_SOURCE_BYTES + 1)
    if len(data) > MAX_SOURCE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_SOURCE_BYTES:,} bytes")
    return data


def extract_files(
    files: Iterable[tuple[str, str, bool]],
) -> tuple[list[str], array[int], dict[str, int]]:
    """Read ``(path, module, is_package)`` files into one small table of names and numbered triples.

    Returns:
        names: every string once; relations among them.
        flat: head, relation, tail numbers, one triple after the other.
        skipped: how many files were left out, by reason: ``unreadable``, ``too large``, ``syntax``.
    """
    numbers: dict[str, int] = {}
    flat: array[int] = array("i")
    skipped: dict[str, int] = {}
    for path, module, is_package in files:
        try:
            triples = extract(read_source(path), module, is_package)
        except OSError:
            reason = "unreadable"
        except (SyntaxError, UnicodeError, RecursionError, MemoryError, tokenize.TokenError):
            reason = "syntax"
        except ValueError as error:
            reason = "too large" if "larger than" in str(error) else "syntax"
        else:
            for triple in triples:
                for name in triple:
                    flat.append(numbers.setdefault(name, len(numbers)))
            continue
        skipped[reason] = skipped.get(reason, 0) + 1
    return list(numbers), flat, skipped


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests until the pipe closes: one JSON line of files in, one reply out.

    A reply is a JSON line ``[bytes of names, bytes of triples, skipped]``, then the names
    (UTF-8, one a line), then the triples (int32, this machine's order).
    """
    for line in requests:
        names, flat, skipped = extract_files(json.loads(line))
        text = "\n".join(names).encode()
        data = flat.tobytes()
        replies.write(json.dumps([len(text), len(data), skipped]).encode() + b"\n")
        replies.write(text)
        replies.write(data)
        replies.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.disable()  # syntax trees hold no cycles, and collecting them takes half the time
    serve(sys.stdin.buffer, sys.stdout.buffer)
