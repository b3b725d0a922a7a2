"""The ``shoal`` command. Commands with heavy imports are loaded only when they run, so that help is immediate."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal_cluster.commands.explain import explain
from shoal_cluster.commands.status import status
from shoal_cluster.commands.talk import chat, generate
from shoal_cluster.commands.tune import tune
from shoal_replica.errors import ShoalError, shown


@dataclass(frozen=True, slots=True)
class _Later:
    """A command or group that is not imported yet: its target, ``module:name``, and its line in the help."""

    target: str
    help: str

    def load(self, name: str) -> Any:
        module, _, function = self.target.partition(":")
        loaded = getattr(import_module(module), function)
        if not isinstance(loaded, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command(name)(loaded)
            loaded = app
        return typer.main.get_command(loaded)


LATER = {
    "bench": _Later("shoal_cluster.commands.bench:app", "Measure what a part of Shoal costs on this machine."),
    "demo": _Later("shoal_cluster.commands.demo:demo", "Start a local cluster and send it eight chats at once."),
    "deploy": _Later("shoal_cluster.commands.deploy:deploy_file", "Apply a Serve YAML to a Ray cluster and wait."),
    "top": _Later("shoal_cluster.commands.top:top", "Show the cluster as the dashboard does, in a terminal."),
    "sim": _Later("shoal_cluster.commands.sim:sim", "Replay a request trace on a simulated cluster."),
}


class _Shoal(TyperGroup):
    """Loads commands lazily, and prints Shoal's own errors in one line instead of a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *LATER]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        later = LATER.get(cmd_name)
        return super().get_command(ctx, cmd_name) if later is None else TyperCommand(cmd_name, help=later.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in LATER:
            for text in args:  # they go to a gateway, which takes text; paths may be any bytes
                if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                    ctx.fail(f"got {shown(text)}; must be valid UTF-8")
            return super().resolve_command(ctx, args)
        return name, LATER[name].load(name), args[1:]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=_Shoal, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (generate, chat, status, explain, tune):
    app.command()(command)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def _shoal(
    asks_version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Shoal: a distributed LLM serving cluster with a paged KV block pool at its centre."""


if __name__ == "__main__":
    app()
