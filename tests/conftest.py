"""What all tests need of the process that runs them."""

import signal

# A job in the background of a script ignores Ctrl-C, and hands that on to its children; the
# tests of Ctrl-C need what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
