"""What every test process starts with, however it was started."""

import signal

import torch

torch.set_num_threads(1)  # small steps wait for each other more than they work

# With `&` or nohup a parent may ignore these signals, and processes inherit that. Tests that stop
# a program need it to hear them: once a handler is set here, programs start with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
