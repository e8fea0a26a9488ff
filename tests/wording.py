"""Lint of names and prose, `python -m tests.wording [PATH ...]`, a part of `make lint`."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FIRST_LINE, MAX_SENTENCE = 15, 30  # words
SUFFIXES = (".py", ".md", ".yaml")
FIRST_WORDS = "What Where Of Those As How From By Who Whose All Each Which When That Why Than If It Its Not And But"
"""A first line that begins with one of them is a clause without a verb or a noun."""
ADVERBS = (
    "alike apart aside away directly else elsewhere ever here hence just never now once only otherwise rather so soon "
    "still then there thus together whole why within without worth what when where which while who whose each every "
    "both none other others another such same own enough several few many begun told said asked seen taken drawn given "
    "made known gone found held kept lost meant met paid sent shown spent taught thought won written chosen broken "
    "hidden knows wants does gives goes says tells draws asks seldom"
)
"""Names that hold no noun, beside words that end in -ed or -ly."""
FIELD_NAMES = "seed need family reply apply enabled truncated tied colocated quantized done required shared expected"
"""Nouns and verbs that end like participles, flags as the libraries name them, and what a test compares with."""
BANNED_WORDS = {
    r"doctor": "diagnostics",
    r"rehears\w*": "dry run",
    r"golds?": "reference answer",
    r"drawn|draws?": "sample",
    r"begun": "started",
    r"told|tells": "report, log, pass",
    r"taught|teach(es|ing)?": "train on, has a gradient",
    r"proves?|proven": "verify",
    r"worth": "weight, priority",
    r"seldom": "rarely",
}
"""Words that this project gave meanings of its own, and the words of the field."""
ALLOWED_NAMES = {
    "solved": "key env.curriculum.solved",
    "flipped": "key rollouts.flipped",
    "malformed": "outcome of a call",
    "next": "TensorDict's key of the step after",
}
"""Name -> reason."""
ALLOWED_FILES = {
    "holds former names": "config/schema/former_names.py tests/config/test_renamed.py",
    "holds the banned words": "tests/wording.py tests/test_wording.py",
    "holds English words or a prompt": "envs/verifiers/english.py config/policy/opsd.yaml",
    "reads a key of a file or of another system": "tests/envs/test_verifiers_compat.py envs/prompts.py "
    "tests/envs/test_verifiers_math.py tests/envs/test_verifiers_simplified.py tests/test_kill_and_resume.py",
}
"""Reason -> files whose banned words stay."""


def list_files(paths: Iterable[str]) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in output.split() if (path := ROOT / name).suffix in SUFFIXES and path.is_file()]


def first_line_problem(docstring: str) -> str | None:
    line, *rest = docstring.splitlines()
    words = line.split()
    if words[0].strip("`,:.") in FIRST_WORDS.split():
        return f"begins with {words[0]}: begin with a verb or a noun"
    if len(words) > MAX_FIRST_LINE:
        return f"{len(words)} words: at most {MAX_FIRST_LINE}"
    if line.endswith("?"):
        return "asks: state it"
    return "runs on: end it on its line, then leave a line empty" if rest and rest[0].strip() else None


def is_bare(name: str) -> bool:
    """Whether a name is one word, and that word a participle or an adverb."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("_")).lower()
    if "_" in word or word in FIELD_NAMES.split() or word in ALLOWED_NAMES:
        return False
    return word in ADVERBS.split() or re.fullmatch(r"[a-z]{2,}(ed|ly)", word) is not None


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, parameters, fields, attributes and constants, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef | ast.Module):
            targets = [t for s in node.body if isinstance(s, ast.Assign) for t in s.targets]
            targets += [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
            yield from ((t.lineno, t.id) for t in targets if isinstance(t, ast.Name))


def problems_of_code(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node)
            if docstring and (problem := first_line_problem(docstring)):
                name = getattr(node, "name", "the module")
                yield getattr(node, "lineno", 1), f"first line of {name} {problem}"
    for line, name in names(tree):
        if not name.startswith("__") and is_bare(name):
            yield line, f"name {name}: add the noun that it holds, or the verb and its object"


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """Yields sentences and table cells of a Markdown page with their lines, without code blocks."""
    plain = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    plain = re.sub(r"`[^`]+`", "code", re.sub(r"\]\([^)]*\)", "]", plain))
    for block in re.finditer(r"(?:.+\n?)+", plain):
        start = plain.count("\n", 0, block.start()) + 1
        for sentence in re.split(r"(?<=[.!?])\s|\s\|\s|\n(?=\s*(?:[-*|#]|\d+\.)\s?)", block[0]):
            yield start, sentence


def problems_of_page(text: str) -> Iterator[tuple[int, str]]:
    for line, sentence in sentences(text):
        if (count := len(re.findall(r"\w[\w'-]*", sentence))) > MAX_SENTENCE:
            yield line, f"sentence of {count} words: {' '.join(sentence.split()[:8])} ..."


def find_banned_words(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, instead in BANNED_WORDS.items():
            if found := re.search(rf"(?<![\w.=/`-])(?:{pattern})(?![\w(=/`-])", line, re.I):
                yield number, f"the word {found[0]}: {instead}"


def problems(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    found = [] if name in " ".join(ALLOWED_FILES.values()) else [*find_banned_words(text)]
    found += {".py": problems_of_code, ".md": problems_of_page}.get(path.suffix, lambda text: [])(text)
    yield from (f"{name}:{line}: {problem}" for line, problem in sorted(found))


def main(paths: list[str]) -> int:
    found = [problem for path in list_files(paths) for problem in problems(path)]
    print(*found or ["names and prose: no problem"], sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
