"""Tests of hundreds of episodes of the real player, on a virtual clock."""

import pytest

from tests.rollout.virtual_player import PlayedEpisodes


@pytest.mark.parametrize("is_remote", [False, True], ids=["process", "pool"])
def test_512_episodes_are_alive_at_a_time_and_all_finish(is_remote: bool) -> None:
    """The environment of each waits 100 ms after each of three turns."""
    episodes = PlayedEpisodes(512, spread_s=0.1, is_remote=is_remote)
    episodes.run()
    assert episodes.most_alive == 512
    assert len(episodes.completions) == 512
    for one in episodes.completions:
        assert (one.finish_reason, len(one.turns)) == ("stop", 3)
        assert one.verdict is not None and (one.verdict.outcome, one.verdict.score) == ("scored", 1.5)
    assert episodes.mean_share >= 0.95 and max(episodes.shares) <= 1 + 1e-6


def test_no_more_episodes_are_alive_than_the_limit() -> None:
    episodes = PlayedEpisodes(64, spread_s=0.0, max_alive=8)
    episodes.run()
    assert episodes.most_alive == 8 and len(episodes.completions) == 64
