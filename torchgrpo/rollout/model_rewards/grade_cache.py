"""Grades of a judge by the content of their requests, in memory or a folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

from config.run_folder.atomic_files import atomic_file
from config.schema.errors import ConfigError, RunError


def content_key(content: Any) -> str:
    """Returns a hash of JSON content, the key of its grade."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class GradeCache:
    """Grades by key.

    Several runs may share the folder: a file has one grade and is written atomically.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self._grades: dict[str, int] = {}
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"env.judge.cache={folder}: the folder cannot be created ({error}); give a folder that is writable"
                ) from error

    def read(self, key: str) -> int | None:
        """Returns the grade of a key, or None. A damaged file counts as absent."""
        if key in self._grades or self.folder is None:
            return self._grades.get(key)
        try:
            grade = json.loads(self._path(self.folder, key).read_bytes())["grade"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if type(grade) is not int:
            return None
        self._grades[key] = grade
        return grade

    def write(self, key: str, grade: int, reply: str) -> None:
        """Keeps a grade; the file also has the judge's reply.

        Raises:
            RunError: the file cannot be written.
        """
        self._grades[key] = grade
        if self.folder is None:
            return
        path = self._path(self.folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                file.write(json.dumps({"grade": grade, "reply": reply}).encode())
        except OSError as error:
            raise RunError(
                f"env.judge.cache={self.folder}: a grade cannot be written ({error}); free some space or choose "
                "another folder, then resume"
            ) from error

    def _path(self, folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
