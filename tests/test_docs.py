"""The documentation: links lead somewhere, the index has every page, and what can be typed exists."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from config.cli.composition import CONFIG_DIR, schema
from config.cli.error_messages import known_keys
from config.cli.other_trainers import HERE
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig
from tests.reference import meanings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
SETTINGS = (
    "env",
    "model",
    "train",
    "policy",
    "train_model",
    "ref_model",
    "inference_model",
    "optimizer",
    "ray",
)
SETTINGS += ("eval", "logging", "plan")
PYTHON_PAGES = ("library.md", "sandbox.md", "architecture.md")
"""Where `env` is an object of Python's and no section."""
TAKE_A_VALUE = (
    "--config-name",
    "--config-dir",
    "--config-path",
    "--cfg",
    "--info",
    "-p",
    "--shell-completion",
)
SETTABLE = schema()
"""Takes each value that is tried, of the right kind alone."""
FREE = ("env.options.", "env.mixture.", "optimizer.group_lr.", "eval.sets.")
"""What follows is a name of the user's."""


@dataclass(frozen=True)
class Command:
    """One line of a fenced block that starts a script: its flags with their values, and its overrides."""

    page: str
    line: str
    flags: dict[str, str]
    overrides: tuple[str, ...]


def fenced(text: str) -> Iterator[str]:
    """The bodies of the blocks of shell commands, which name no language or bash."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "bash"):
            yield body.replace("\\\n", " ")


def commands() -> Iterator[Command]:
    for page in PAGES:
        for body in fenced(page.read_text()):
            for line in body.splitlines():
                found = re.match(
                    r"^(?:\$ |[A-Z_]+=\S+ )*(?:python grpo(?:_async)?\.py|grpo|grpo-async)(?=\s|$)(.*)", line
                )
                if found:
                    yield command(page.name, line, found[1])


def command(page: str, line: str, rest: str) -> Command:
    words = iter(shlex.split(rest, comments=True))
    flags, overrides = {}, []
    for word in words:
        if word in ("&", "2>", ">", "|"):
            break
        if word.startswith("-"):
            flags[word] = next(words) if word in TAKE_A_VALUE else ""
        else:
            overrides.append(word)
    return Command(page, line, flags, tuple(overrides))


COMMANDS = list(commands())


def test_commands_were_found() -> None:
    assert len(COMMANDS) > 60
    assert {"README.md", "faq.md", "scaling.md", "coming_from.md"} <= {each.page for each in COMMANDS}


def test_every_config_that_a_command_names_ships() -> None:
    for each in COMMANDS:
        name = each.flags.get("--config-name")
        if name and name != "NAME" and not {"--config-dir", "--config-path"} & each.flags.keys():
            assert (CONFIG_DIR / f"{name}.yaml").is_file(), f"{each.page}: {each.line}"


@pytest.mark.parametrize("page", sorted({each.page for each in COMMANDS}))
def test_every_setting_of_a_command_exists(page: str) -> None:
    for each in COMMANDS:
        if each.page == page:
            left_open = [word for word in each.overrides if word.endswith("=…")]
            for word in left_open:
                exists(word.partition("=")[0], f"{page}: {each.line}")
            # `run_dir=A,B` is a list before Hydra sees it.
            words = [
                word for word in each.overrides if not word.startswith("run_dir=") and word not in left_open
            ]
            for override in OverridesParser.create().parse_overrides(words):
                check(override, each)


def check(override: Override, of: Command) -> None:
    """That the key exists and takes the value. Of a sweep, each of its values."""
    where, key = f"{of.page}: {of.line}", override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        return
    if override.is_add():
        assert "--config-dir" in of.flags, f"{where}: + adds nothing to a config that ships"
        return
    if override.is_sweep_override():
        assert "--multirun" in of.flags, f"{where}: {key} has several values"
    for value in values_of(override):
        takes(key, value, where)


def values_of(override: Override) -> list[Any]:
    if override.is_choice_sweep() or override.is_range_sweep():
        return [text.strip("'\"") for text in override.sweep_string_iterator()]
    return [] if override.is_sweep_override() else [override.value()]


def takes(key: str, value: Any, where: str) -> None:
    if key in ("policy", "optimizer"):
        assert (CONFIG_DIR / key / f"{value}.yaml").is_file(), where
        return
    exists(key, where)
    if key == "run":
        assert f"`{value}`" in meanings(Config)["run"], where
    for settings in sets_in(key, value):
        assert settings <= {field.name for field in fields(EvalSetConfig)}, where
    OmegaConf.update(SETTABLE, key, value)


def exists(key: str, where: str) -> None:
    assert key in known_keys(Config) or key.startswith(FREE), f"{where}: there is no {key}"


def sets_in(key: str, value: Any) -> list[set[str]]:
    """The fields of evaluation sets that an override sets."""
    parts = key.split(".")
    if parts[:2] != ["eval", "sets"]:
        return []
    if len(parts) == 4:
        return [{parts[3]}]
    sets = value.values() if len(parts) == 2 else [value]
    return [set(one) for one in sets]


def without_code(text: str) -> str:
    """The page without its fenced blocks and pieces of code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(path: Path) -> set[str]:
    """GitHub makes them of the headings: small letters, hyphens for spaces, no punctuation."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        made = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(made if made not in found else f"{made}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_text_names_exists(page: Path) -> None:
    """NAME stands for one that a reader makes."""
    rooms = "|".join(path.name for path in ROOT.iterdir() if list(path.glob("*.py")))
    named = re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w/]+\.(?:py|yaml|js))\b", page.read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_loop_of_the_readme_is_that_of_the_script() -> None:
    (loop,) = re.findall(r"^```python\n(def train.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert loop in (ROOT / "grpo.py").read_text()


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w.]+\.md)", (DOCS / "index.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - linked == {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_a_text_names_exists(page: Path) -> None:
    if page.name in PYTHON_PAGES:
        return
    text = ours_of(page)
    for name in re.findall(rf"`((?:{'|'.join(SETTINGS)})\.[a-z_.]+[a-z_])(?:=[^`]*)?`", text):
        sections = {key.rpartition(".")[0] for key in known_keys(Config)}
        if name not in sections and not name.endswith(
            (".py", ".yaml", ".json", ".jsonl", ".md", ".safetensors")
        ):
            exists(name, page.name)


def ours_of(page: Path) -> str:
    """The text; of the tables of other trainers' names all but their first column."""
    text = page.read_text()
    if page.name != "coming_from.md":
        return text
    rows = [cells(line)[1:] for line in text.splitlines() if line.startswith("|")]
    return "\n".join(cell for row in rows for cell in row)


def test_every_metric_that_answers_and_glossary_name_is_explained() -> None:
    explained = (DOCS / "metrics.md").read_text()
    sections = set(re.findall(r"`([a-z_]+)/[^`/]+`", explained))
    for page in ("faq.md", "glossary.md", "coming_from.md"):
        text = (DOCS / page).read_text() if page != "coming_from.md" else ours_of(DOCS / page)
        for section, name in re.findall(r"`([a-z_]+)/([a-z_0-9]+)`", text):
            assert section not in sections or f"`{section}/{name}`" in explained, f"{page}: {section}/{name}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def translations() -> Iterator[tuple[list[str], str]]:
    """Rows of docs/coming_from.md: another trainer's names, and what is here in their place."""
    for line in (DOCS / "coming_from.md").read_text().splitlines():
        if line.startswith("| `"):
            theirs, here, *_ = cells(line)
            yield re.findall(r"`([^`]+)`", theirs), here


def test_translations_take_presets_and_values_that_exist() -> None:
    rows = list(translations())
    assert len(rows) > 80
    for theirs, here in rows:
        for given in re.findall(r"`([\w.]+=[^`]+)`", here):
            for override in OverridesParser.create().parse_overrides(shlex.split(given)):
                takes(override.key_or_group, override.value(), f"coming_from.md: {theirs}")


def test_translations_are_those_of_the_messages() -> None:
    """A message about a mistyped key leads to the same keys, as far as it names any."""
    told = 0
    for theirs, here in translations():
        said = [HERE[name] for name in theirs if name in HERE]
        told += len(said)
        keys = {key for text in said for key in re.findall(r"[a-z_]+(?:\.[A-Za-z_]+)+", text)}
        if keys:
            assert any(key in here for key in keys), f"{theirs}: {said}"
    assert told > 40


def test_the_steps_beside_trls_and_verls_are_the_same() -> None:
    """The arithmetic of docs/coming_from.md: its two commands give what the text says of them."""
    trl, verl = (each for each in COMMANDS if each.page == "coming_from.md" and "env.num_envs" in each.line)
    config = made(trl)
    assert (config.completions_per_iteration, config.optim_batch_size) == (64, 64)
    assert config.total_optimizer_steps == 100
    assert config.optim_batch_size // config.train.gradient_accumulation_steps == 8
    config = made(verl)
    assert (config.completions_per_iteration, config.optim_batch_size) == (5120, 1280)
    assert config.optimizer_steps_per_iteration == 4
    assert (
        config.optim_batch_size // (config.train_model.ranks * config.train.gradient_accumulation_steps) == 8
    )


def made(each: Command) -> Config:
    """The command's config, without its preset."""
    given = [word for word in each.overrides if not word.startswith(("policy=", "optimizer="))]
    merged = OmegaConf.merge(schema(), OmegaConf.from_dotlist(given))
    config = OmegaConf.to_object(
        OmegaConf.merge(merged, {"model": {"name": "x"}, "env": {"dataset": "gsm8k"}})
    )
    assert isinstance(config, Config)
    return config


def test_every_make_target_that_is_named_is_one() -> None:
    files = [
        *PAGES,
        *ROOT.glob("*.py"),
        *(path for room in ("config", "envs", "torchgrpo") for path in (ROOT / room).rglob("*.py")),
    ]
    named = {one for path in files for one in re.findall(r"(?:`|^)make (\w[\w-]*)", path.read_text(), re.M)}
    assert {"run", "vllm", "test"} <= named
    assert named <= set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_finds_what_is_not_installed(path: Path) -> None:
    """`python benchmarks/NAME.py` has the folder of the script before it, not the checkout."""
    text = path.read_text()
    if re.search(r"^from (tests|benchmarks)\b", text, re.MULTILINE):
        assert re.search(r"^sys\.path\.insert\(0, str\(", text, re.MULTILINE)
