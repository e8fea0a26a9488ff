"""Finds models that the ranks of `train_model.context_parallel` cannot compute together.

The module imports no torch.
"""


def context_problem(size: int, packs: bool, kv_heads: int, key: str, name: str) -> str | None:
    """Returns why `size` ranks cannot compute a microbatch together, or None.

    packs: whether the rows of the model are packed. kv_heads: its key-value heads. key, name: the setting that names
    the model, and its value.
    """
    setting = f"train_model.context_parallel={size} with {key}={name}"
    if size > 1 and not packs:
        return (
            f"{setting}: not every layer is known to use plain causal attention, so rows are not packed, and only a "
            "packed sequence is divided among ranks; set train_model.context_parallel=1"
        )
    if kv_heads % size:
        return (
            f"{setting}: the model has {kv_heads} key-value heads, which are divided evenly among the ranks; set "
            f"train_model.context_parallel to a divisor of {kv_heads}"
        )
    return None
