"""The words of a command line, before Hydra reads them."""

from hydra._internal.utils import get_args_parser

from config.command_line import overrides_last


def test_overrides_stand_on_both_sides_of_options() -> None:
    words = [
        "train.seed=1,2",
        "--config-name",
        "mine",
        "~logging",
        "-m",
        "env@train=x",
        "+env.options={a: 1}",
    ]
    parsed = get_args_parser().parse_args(overrides_last(words))
    assert (parsed.config_name, parsed.multirun) == ("mine", True)
    assert parsed.overrides == ["train.seed=1,2", "~logging", "env@train=x", "+env.options={a: 1}"]


def test_a_folder_whose_name_looks_like_an_override_stays_with_its_option() -> None:
    words = ["run=plan", "--config-dir", "train.seed=5/mine", "train.seed=7", "--cfg", "job"]
    parsed = get_args_parser().parse_args(overrides_last(words))
    assert (parsed.config_dir, parsed.cfg) == ("train.seed=5/mine", "job")
    assert parsed.overrides == ["run=plan", "train.seed=7"]
