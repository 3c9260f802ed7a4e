"""`unisono completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

COMPLETE = "_UNISONO_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Prints the script with which SHELL completes `unisono`.

    \b
    bash   echo 'eval "$(unisono completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(unisono completion zsh)"' >> ~/.zshrc
    fish   unisono completion fish > ~/.config/fish/completions/unisono.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "unisono", COMPLETE).source())
