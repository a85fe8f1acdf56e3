"""What a person's own modules add: drafters, engines, stores, trackers (docs/extending.md)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from .errors import UserError, did_you_mean, first_line

T = TypeVar("T")


class Registry(dict[str, T]):
    """name → what makes such a thing. key: of the recipe, which chooses one by its name."""

    def __init__(self, key: str, ours: dict[str, T] | None = None):
        super().__init__(ours or {})
        self.key = key

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator. Raises UserError when another thing has this name."""

        def add(made: T) -> T:
            other = self.get(name)
            if other is not None and _origin(other) != _origin(made):
                raise UserError(
                    f"{self.key}={name} is {_origin(other)} already", fix=f"register {_origin(made)} by another name"
                )
            self[name] = made
            return made

        return add

    def choose(self, name: str) -> T:
        """Raises UserError when nothing has this name."""
        if name not in self:
            raise UserError(
                f"{self.key}={name} is not one of {', '.join(sorted(self))}",
                fix=did_you_mean(name, self) or "a name of your own needs plugins=[<module that registers it>]",
            )
        return self[name]


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules that register something. They are looked for among installed packages, in PYTHONPATH and, last, in the
    working directory. Raises UserError when one cannot be imported."""
    modules = list(modules)
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: no file there takes the place of an installed module
    for name in modules:
        try:
            importlib.import_module(name)
        except UserError as error:
            raise UserError(f"plugins=[{name}]: {error.what}", where=error.where, fix=error.fix) from error
        except Exception as error:
            raise UserError(
                f"plugins=[{name}] cannot be imported: {type(error).__name__}: {first_line(error)}",
                where=_line(error),
                fix="name a module that is installed, in PYTHONPATH or in this folder, such as my_package.my_drafter",
            ) from error


def _origin(made: object) -> str:
    return f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', made)}"


def _line(error: BaseException) -> str | None:
    """Where in a person's own file it happened: the last frame that is not Python's import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place, trace = None, error.__traceback__
    while trace:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and file != __file__ and not file.endswith("importlib/__init__.py"):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
