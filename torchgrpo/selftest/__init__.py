"""Self-test `python -m torchgrpo.selftest`: checks every feature that this machine can run.

    catalogue ─▶ runner ──a process for each group──▶ child ─▶ bodies in `*_checks.py` ─▶ results ─▶ main

Only the bodies of the checks import torch, so that the self-test reports a torch that does not load.
"""
