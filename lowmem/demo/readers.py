"""The processes that read source files for `codegraph.py`, each running `extract.py`."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Generator
from typing import IO, Any

from lowmem.demo import extract as extractor

File = tuple[str, str, bool]  # path, module name, is it a package's __init__
Reply = tuple[list[str], "array[int]", dict[str, int]]  # as `extract_files` returns it


def replies_of(
    batches: list[list[File]], workers: int, deadline: float
) -> Generator[tuple[int, Reply], None, None]:
    """(batch number, reply) as the workers answer, until all is read or time is up.

    Workers are plain subprocesses that run `extract.py` by its path, not `multiprocessing`:
    nothing of the caller's ``__main__`` is imported again, so this works alike in a notebook,
    in a script without a main guard, and from standard input.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(batches)):
        todo.put(index)
    answers: queue.SimpleQueue[tuple[int, Reply] | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    processes: set[subprocess.Popen[bytes]] = set()
    count = max(1, min(workers, len(batches)))

    def tend() -> None:
        process: subprocess.Popen[bytes] | None = None
        try:
            while not stop.is_set():
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    break
                if process is None:
                    process = _start_worker()
                    processes.add(process)
                reply = _ask(process, batches[index])
                if reply is None and not stop.is_set():  # a file that kills the parser
                    process.kill()
                    process.wait()
                    process = None
                    reply = [], array("i"), {"reader died": len(batches[index])}
                if reply is not None:
                    answers.put((index, reply))
        except BaseException as error:
            answers.put(error)
        finally:
            if process is not None:
                _end_worker(process)
            answers.put(None)

    threads = [threading.Thread(target=tend, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        ended = 0
        while ended < count:
            try:
                answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if answer is None:
                ended += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                yield answer
    finally:
        stop.set()
        for process in list(processes):
            if process.poll() is None:
                process.kill()
        for thread in threads:
            thread.join(timeout=10)


def _start_worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-W", "ignore", extractor.__file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end_worker(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(process: subprocess.Popen[bytes], files: list[File]) -> Reply | None:
    """One request and its reply; None if the worker died over it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(files).encode() + b"\n")
        process.stdin.flush()
        head = process.stdout.readline()
        if not head.endswith(b"\n"):
            return None
        text_size, data_size, skipped = json.loads(head)
        text = _exactly(process.stdout, text_size)
        data = _exactly(process.stdout, data_size)
    except (OSError, ValueError, EOFError):
        return None
    flat = array("i")
    flat.frombytes(data)
    return (text.decode().split("\n") if text else []), flat, skipped


def _exactly(pipe: IO[bytes], size: int) -> Any:
    data = pipe.read(size)
    if len(data) != size:
        raise EOFError
    return data
