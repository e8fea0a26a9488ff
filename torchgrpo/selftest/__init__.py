"""`python -m torchgrpo.selftest`: tries every path that this machine has, and says what works.

    catalogue ─▶ runner ──a process for each group──▶ child ─▶ machine, learner, engines, runs ─▶ rows ─▶ main

Everything but the bodies is light: it imports no torch, so that a machine where torch does not load is told so too.
"""
