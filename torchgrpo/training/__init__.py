"""Silences a message of bitsandbytes before any module of this package imports peft."""

import logging

# peft imports bitsandbytes where it is installed, which then asks for a package that downloads kernels.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
