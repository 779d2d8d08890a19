"""Imported first by the services: as process 1 of a container they end on SIGTERM from their first line on.

The kernel keeps from process 1 every signal that it has no handler for, and importing the rest of a service takes
seconds. Whoever stops a container meanwhile would wait for all of its grace, and kill it. Later the service drains
instead. Other processes are ended by the signal itself.
"""

import os
import signal

if os.getpid() == 1:
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
