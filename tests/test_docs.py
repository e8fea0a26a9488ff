"""Checks the documentation: links, page index, and every named file, setting and command."""

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
from config.cli.keys_of_other_trainers import KEY_EQUIVALENTS
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig
from tests.reference import meanings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
SECTIONS = ("env", "model", "train", "policy", "train_model", "ref_model", "inference_model", "optimizer", "ray")
SECTIONS += ("eval", "logging", "machine", "rewards", "export", "replay", "rollouts")
PYTHON_PAGES = ("library.md", "sandbox.md", "architecture.md")
"""Pages on which `env` is a Python object, not a config section."""
FLAGS_WITH_A_VALUE = ("--config-name", "--config-dir", "--config-path", "--cfg", "--info", "-p", "--shell-completion")
SCRATCH_CONFIG = schema()
"""Config that each value is set in; OmegaConf refuses values of another type."""
USER_KEY_PREFIXES = ("env.options.", "env.mixture.", "optimizer.group_lr.", "eval.sets.")
"""Prefixes of keys whose last segments are names of the user."""


@dataclass(frozen=True)
class Command:
    """Command line of a fenced block that starts a script.

    flags: flag -> value, "" for a flag without one. overrides: Hydra overrides of the config.
    """

    page: str
    line: str
    flags: dict[str, str]
    overrides: tuple[str, ...]


def shell_blocks(text: str) -> Iterator[str]:
    """Yields the bodies of fenced blocks that name bash or no language."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "bash"):
            yield body.replace("\\\n", " ")


def read_commands() -> Iterator[Command]:
    for page in PAGES:
        for body in shell_blocks(page.read_text()):
            for line in body.splitlines():
                match = re.match(
                    r"^(?:\$ |[A-Z_]+=\S+ )*(?:python grpo(?:_async)?\.py|grpo|grpo-async)(?=\s|$)(.*)", line
                )
                if match:
                    yield parse_command(page.name, line, match[1])


def parse_command(page: str, line: str, rest: str) -> Command:
    words = iter(shlex.split(rest, comments=True))
    flags, overrides = {}, []
    for word in words:
        if word in ("&", "2>", ">", "|"):
            break
        if word.startswith("-"):
            flags[word] = next(words) if word in FLAGS_WITH_A_VALUE else ""
        else:
            overrides.append(word)
    return Command(page, line, flags, tuple(overrides))


COMMANDS = list(read_commands())


def test_commands_were_found() -> None:
    assert len(COMMANDS) > 60
    assert {"README.md", "faq.md", "scaling.md", "coming_from.md"} <= {command.page for command in COMMANDS}


def test_every_config_that_a_command_names_ships() -> None:
    for command in COMMANDS:
        name = command.flags.get("--config-name")
        if name and name != "NAME" and not {"--config-dir", "--config-path"} & command.flags.keys():
            assert (CONFIG_DIR / f"{name}.yaml").is_file(), f"{command.page}: {command.line}"


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_setting_of_a_command_exists(page: str) -> None:
    for command in COMMANDS:
        if command.page == page:
            open_words = [word for word in command.overrides if word.endswith("=…")]
            for word in open_words:
                check_key(word.partition("=")[0], f"{page}: {command.line}")
            # `run_dir=A,B` is a list before Hydra sees it.
            words = [word for word in command.overrides if not word.startswith("run_dir=") and word not in open_words]
            for override in OverridesParser.create().parse_overrides(words):
                check_override(override, command)


def check_override(override: Override, command: Command) -> None:
    """Checks that the key exists and accepts the value; for a sweep, each value."""
    position, key = f"{command.page}: {command.line}", override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        return
    if override.is_add():
        assert "--config-dir" in command.flags, f"{position}: a shipped config has all keys, + adds nothing"
        return
    if override.is_sweep_override():
        assert "--multirun" in command.flags, f"{position}: {key} has several values"
    for value in values_of(override):
        check_value(key, value, position)


def values_of(override: Override) -> list[Any]:
    if override.is_choice_sweep() or override.is_range_sweep():
        return [text.strip("'\"") for text in override.sweep_string_iterator()]
    return [] if override.is_sweep_override() else [override.value()]


def check_value(key: str, value: Any, position: str) -> None:
    if key in ("policy", "optimizer"):
        assert (CONFIG_DIR / key / f"{value}.yaml").is_file(), position
        return
    check_key(key, position)
    if key == "run":
        assert f"`{value}`" in meanings(Config)["run"], position
    for settings in eval_set_fields(key, value):
        assert settings <= {field.name for field in fields(EvalSetConfig)}, position
    OmegaConf.update(SCRATCH_CONFIG, key, value)


def check_key(key: str, position: str) -> None:
    assert key in known_keys(Config) or key.startswith(USER_KEY_PREFIXES), f"{position}: there is no {key}"


def eval_set_fields(key: str, value: Any) -> list[set[str]]:
    """Returns the fields that an override sets, one set of names per evaluation set."""
    segments = key.split(".")
    if segments[:2] != ["eval", "sets"]:
        return []
    if len(segments) == 4:
        return [{segments[3]}]
    sets = value.values() if len(segments) == 2 else [value]
    return [set(eval_set) for eval_set in sets]


def without_code(text: str) -> str:
    """Returns a page without fenced blocks and inline code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def heading_anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page.

    An anchor is in lower case, with hyphens for spaces and without punctuation.
    """
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        anchors.add(anchor if anchor not in anchors else f"{anchor}-1")
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in heading_anchors(path), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_text_names_exists(page: Path) -> None:
    """NAME stands for a file that the reader creates."""
    packages = "|".join(path.name for path in ROOT.iterdir() if list(path.glob("*.py")))
    named = re.findall(rf"(?<![\w/.-])((?:{packages})/[\w/]+\.(?:py|yaml|js))\b", page.read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_loop_of_the_readme_is_that_of_the_script() -> None:
    (loop,) = re.findall(r"^```python\n(def train.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert loop in (ROOT / "grpo.py").read_text()


def test_the_guide_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w.]+\.md)", (DOCS / "guide.md").read_text()))
    website_pages = {"index.md", "changelog.md", "contributing.md"}
    assert {page.name for page in DOCS.glob("*.md")} - linked == {"guide.md", *website_pages}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_a_text_names_exists(page: Path) -> None:
    if page.name in PYTHON_PAGES:
        return
    text = project_text(page)
    for name in re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z_])(?:=[^`]*)?`", text):
        sections = {key.rpartition(".")[0] for key in known_keys(Config)}
        if name not in sections and not name.endswith((".py", ".yaml", ".json", ".jsonl", ".md", ".safetensors")):
            check_key(name, page.name)


def project_text(page: Path) -> str:
    """Returns the text of a page without the columns of tables that hold other names.

    Those are the names of other trainers in coming_from.md, and former names in CHANGELOG.md.
    """
    text = page.read_text()
    rows = [table_cells(line) for line in text.splitlines() if line.startswith("|")]
    if page.name == "coming_from.md":
        return "\n".join(cell for row in rows for cell in row[1:])
    if page.name == "CHANGELOG.md":
        prose = [line for line in text.splitlines() if not line.startswith("|")]
        return "\n".join([*prose, *(row[-1] for row in rows)])
    return text


def test_every_metric_that_answers_and_glossary_name_is_explained() -> None:
    explained = (DOCS / "metrics.md").read_text()
    sections = set(re.findall(r"`([a-z_]+)/[^`/]+`", explained))
    for page in ("faq.md", "glossary.md", "coming_from.md"):
        text = (DOCS / page).read_text() if page != "coming_from.md" else project_text(DOCS / page)
        for section, name in re.findall(r"`([a-z_]+)/([a-z_0-9]+)`", text):
            assert section not in sections or f"`{section}/{name}`" in explained, f"{page}: {section}/{name}"


def table_cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def translations() -> Iterator[tuple[list[str], str]]:
    """Yields the rows of docs/coming_from.md: names of another trainer, and our counterpart."""
    for line in (DOCS / "coming_from.md").read_text().splitlines():
        if line.startswith("| `"):
            names, counterpart, *_ = table_cells(line)
            yield re.findall(r"`([^`]+)`", names), counterpart


def test_translations_take_presets_and_values_that_exist() -> None:
    rows = list(translations())
    assert len(rows) > 80
    for names, counterpart in rows:
        for words in re.findall(r"`([\w.]+=[^`]+)`", counterpart):
            for override in OverridesParser.create().parse_overrides(shlex.split(words)):
                check_value(override.key_or_group, override.value(), f"coming_from.md: {names}")


def test_translations_agree_with_the_error_messages() -> None:
    """Messages about keys of other trainers name the keys that the page names."""
    num_messages = 0
    for names, counterpart in translations():
        messages = [KEY_EQUIVALENTS[name] for name in names if name in KEY_EQUIVALENTS]
        num_messages += len(messages)
        keys = {key for text in messages for key in re.findall(r"[a-z_]+(?:\.[A-Za-z_]+)+", text)}
        if keys:
            assert any(key in counterpart for key in keys), f"{names}: {messages}"
    assert num_messages > 40


def test_the_steps_beside_trls_and_verls_are_the_same() -> None:
    """The two commands of docs/coming_from.md have the batch sizes that the text states."""
    trl, verl = (command for command in COMMANDS if command.page == "coming_from.md" and "env.num_envs" in command.line)
    config = command_config(trl)
    assert (config.completions_per_iteration, config.optim_batch_size) == (64, 64)
    assert config.total_optimizer_steps == 100
    assert config.optim_batch_size // config.train.gradient_accumulation_steps == 8
    config = command_config(verl)
    assert (config.completions_per_iteration, config.optim_batch_size) == (5120, 1280)
    assert config.optimizer_steps_per_iteration == 4
    assert config.optim_batch_size // (config.train_model.ranks * config.train.gradient_accumulation_steps) == 8


def command_config(command: Command) -> Config:
    """Returns the config of a command, without its presets."""
    overrides = [word for word in command.overrides if not word.startswith(("policy=", "optimizer="))]
    merged = OmegaConf.merge(schema(), OmegaConf.from_dotlist(overrides))
    config = OmegaConf.to_object(OmegaConf.merge(merged, {"model": {"name": "x"}, "env": {"dataset": "gsm8k"}}))
    assert isinstance(config, Config)
    return config


def test_every_make_target_that_is_named_is_one() -> None:
    files = [
        *PAGES,
        *ROOT.glob("*.py"),
        *(path for package in ("config", "envs", "torchgrpo") for path in (ROOT / package).rglob("*.py")),
    ]
    named = {target for path in files for target in re.findall(r"(?:`|^)make (\w[\w-]*)", path.read_text(), re.M)}
    assert {"run", "vllm", "test"} <= named
    assert named <= set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_finds_modules_of_the_checkout(path: Path) -> None:
    """`python benchmarks/NAME.py` puts the script's folder on `sys.path`, not the checkout."""
    text = path.read_text()
    if re.search(r"^from (tests|benchmarks)\b", text, re.MULTILINE):
        assert re.search(r"^sys\.path\.insert\(0, str\(", text, re.MULTILINE)
