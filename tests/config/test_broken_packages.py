"""Tests that import errors of packages are distinguished from bugs of this project."""

import tomllib
from pathlib import Path

import pytest

from config.cli import broken_packages
from config.cli.broken_packages import PROJECT_DIR, PROJECT_PACKAGES, broken_package_message


def raise_from_file(code: str, file: Path) -> BaseException:
    """Runs code as the content of a file and returns the exception."""
    try:
        exec(compile(code, str(file), "exec"), {})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_cause_is_named_and_where_it_lies(tmp_path: Path) -> None:
    place = tmp_path / "given.py"
    code = "try: 1 / 0\nexcept ZeroDivisionError as why: raise ImportError('set the verbosity to DEBUG') from why"
    message = broken_package_message(raise_from_file(code, place))
    assert message is not None
    assert message.startswith(f"a package does not load: division by zero (ZeroDivisionError in {place}, line 1). ")


def test_an_earlier_failed_import_is_no_cause(tmp_path: Path) -> None:
    code = "try:\n    import no_such_thing\nexcept ImportError:\n    import nor_this"
    message = broken_package_message(raise_from_file(code, tmp_path / "given.py"))
    assert message is not None
    assert "No module named 'nor_this'" in message


def test_packages_may_lie_within_the_project() -> None:
    inside = PROJECT_DIR / ".venv" / "lib" / "site-packages" / "given.py"
    assert broken_package_message(raise_from_file("import no_such_thing", inside))


def test_bugs_of_this_project_have_no_message(tmp_path: Path) -> None:
    assert (
        broken_package_message(raise_from_file("import no_such_thing", PROJECT_DIR / "torchgrpo" / "build.py")) is None
    )
    assert broken_package_message(raise_from_file("1 / 0", tmp_path / "given.py")) is None


def test_a_missing_package_has_no_message() -> None:
    code = "import importlib\nimportlib.import_module('no_such_thing')"
    assert broken_package_message(raise_from_file(code, PROJECT_DIR / "torchgrpo" / "machine.py")) is None


def test_in_site_packages_only_our_packages_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_packages, "PROJECT_DIR", tmp_path)
    assert broken_package_message(raise_from_file("import no_such_thing", tmp_path / "torchgrpo" / "build.py")) is None
    assert broken_package_message(raise_from_file("import no_such_thing", tmp_path / "grpo.py")) is None
    assert broken_package_message(raise_from_file("import no_such_thing", tmp_path / "transformers" / "given.py"))


def test_all_installed_packages_of_the_project_are_known() -> None:
    packaged = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name.partition(".")[0].rstrip("*") for name in packaged["packages"]["find"]["include"]}
    expected = folders | set(packaged["py-modules"]) | {"benchmarks", "tests"}
    assert expected == PROJECT_PACKAGES
