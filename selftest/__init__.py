"""`run=selftest`: tries every path that this machine has, each in a process of its own, and says what works.

    catalogue ─▶ runner ──a process for each check──▶ bodies (machine, learner, engine, run) ─▶ rows ─▶ report

Everything but the bodies is light: it imports no torch, so that a machine where torch does not load is told so too.
"""
