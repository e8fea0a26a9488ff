"""What came of a package that does not load, and what is a fault of ours."""

import tomllib
from pathlib import Path

import pytest

from config.cli import broken_packages
from config.cli.broken_packages import OURS, PROJECT, broken_package


def raised(code: str, file: Path) -> BaseException:
    """What this code raises as that file's."""
    try:
        exec(compile(code, str(file), "exec"), {})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_cause_is_named_and_where_it_lies(tmp_path: Path) -> None:
    place = tmp_path / "given.py"
    code = "try: 1 / 0\nexcept ZeroDivisionError as why: raise ImportError('set the verbosity to DEBUG') from why"
    message = broken_package(raised(code, place))
    assert message is not None
    assert message.startswith(
        f"a package does not load: division by zero (ZeroDivisionError in {place}, line 1). "
    )


def test_what_was_tried_before_is_no_cause(tmp_path: Path) -> None:
    code = "try:\n    import no_such_thing\nexcept ImportError:\n    import nor_this"
    message = broken_package(raised(code, tmp_path / "given.py"))
    assert message is not None
    assert "No module named 'nor_this'" in message


def test_packages_may_lie_within_the_project() -> None:
    inside = PROJECT / ".venv" / "lib" / "site-packages" / "given.py"
    assert broken_package(raised("import no_such_thing", inside))


def test_faults_of_ours_stay_faults(tmp_path: Path) -> None:
    assert broken_package(raised("import no_such_thing", PROJECT / "torchgrpo" / "build.py")) is None
    assert broken_package(raised("1 / 0", tmp_path / "given.py")) is None


def test_a_package_that_is_not_there_is_no_broken_one() -> None:
    code = "import importlib\nimportlib.import_module('no_such_thing')"
    assert broken_package(raised(code, PROJECT / "torchgrpo" / "machine.py")) is None


def test_beside_other_packages_only_our_own_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_packages, "PROJECT", tmp_path)
    assert broken_package(raised("import no_such_thing", tmp_path / "torchgrpo" / "build.py")) is None
    assert broken_package(raised("import no_such_thing", tmp_path / "grpo.py")) is None
    assert broken_package(raised("import no_such_thing", tmp_path / "transformers" / "given.py"))


def test_all_that_is_installed_of_us_is_ours() -> None:
    packaged = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name.partition(".")[0].rstrip("*") for name in packaged["packages"]["find"]["include"]}
    expected = folders | set(packaged["py-modules"]) | {"benchmarks", "tests"}
    assert expected == OURS
