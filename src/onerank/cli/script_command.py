"""The script of `capture run` and `capture verify`: its argument, and its options after `--`."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from onerank.capture.options import SCRIPT, Options
from onerank.cli.click_options import Command, SectionedCommand, option, with_options


def script_of(module: str) -> tuple[Path, str]:
    """Return the file of a module, and the name to run it by, without importing anything.

    Raises:
        UsageError: no such module in the working directory or among installed packages.
    """
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        places = _places(module)
    finally:
        sys.path.remove(directory)
    for place in places:
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py"), module
        if (place / "__main__.py").is_file():
            return place / "__main__.py", f"{module}.__main__"
    raise click.UsageError(
        f"-m {module}: no such module, or package with a __main__.py, in {directory} or installed; "
        "expected a name with dots, as in python -m package.train"
    )


def _places(module: str) -> list[Path]:
    """Return where a module could lie, without a suffix."""
    first, *submodules = module.split(".")
    specs = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:  # a file
        return [Path(spec.origin).with_suffix("")] if spec.origin and not submodules else []
    return [Path(place, *submodules) for place in spec.submodule_search_locations]


class ScriptCommand(SectionedCommand):
    """A command that runs a script, whose own arguments come after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown option may be one of the script's."""
        script = next((arg for arg in args if arg.endswith(".py")), "SCRIPT")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()}\nA script's own arguments come after --: "
                f"{ctx.command_path} {script} ... -- {error.option_name} ...",
                ctx,
            ) from None


class _Script(click.Path):
    """A file that exists, or with -m the name of a module."""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if ctx is not None and ctx.params.get("module"):
            return Path(value)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """How the SCRIPT argument names the script."""

    module: bool = option(
        "SCRIPT is a module's name, as in python -m.",
        *("-m", "--module"),
        heading=SCRIPT,
        default=False,
        is_eager=True,  # before SCRIPT, which is then no file
    )

    def located(self, script: Path) -> tuple[Path, str | None]:
        """Return the file of SCRIPT and, of a module, the name to run it by.

        Raises:
            UsageError: there is no such module.
        """
        return script_of(str(script)) if self.module else (script, None)


def job_options(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that gives a command SCRIPT, its arguments and the options of a capture.

    The command gets them as `script`, `args`, `named` (`ScriptOptions`) and `job` (`Options`).

    Args:
        without: options of a capture that the command does not offer.
    """
    script = _Script(exists=True, dir_okay=False, path_type=Path)

    def decorate(command: Command) -> Command:
        command = with_options(Options, "job", without=without)(command)
        command = with_options(ScriptOptions, "named")(command)
        command = click.argument("args", nargs=-1, metavar="[-- ARGS]")(command)
        return click.argument("script", type=script)(command)

    return decorate
