"""Fixtures of tests with several ranks or scorers."""

import pytest

from envs.group import Group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small Llama."""
    from tests.training.test_ranks import small_llama

    folder = tmp_path_factory.mktemp("model")
    small_llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Groups with prompts and responses of unequal length."""
    from tests.groups import sample_groups
    from tests.tiny_models import numbered_examples
    from tests.training.test_ranks import GROUPS, MAX_TOKENS, REPEATS, length_verdict, small_llama

    examples = numbered_examples(50)[:GROUPS]
    return sample_groups(small_llama(), examples, REPEATS, MAX_TOKENS, judge=length_verdict)
