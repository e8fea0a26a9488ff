"""Punishments for length, in tokens. Each is a pure function of the length alone."""


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """0 up to `limit - cache`, falling in a straight line to -1 at `limit`, -1 beyond.

    Never rises with length (DAPO, arXiv 2503.14476, equation 13), so that no answer gains by being longer.
    """
    if length <= limit - cache:
        return 0.0 if length <= limit else -1.0
    return -1.0 if length >= limit else (limit - cache - length) / cache
