"""`skipstone push PATH REPO_ID`: upload a model, exit heads or a profile to the Hugging Face hub, with a card."""

from pathlib import Path
from typing import Annotated

import typer

from skipstone.cli import terminal
from skipstone.cli.options import option


def push(
    path: Annotated[
        Path,
        typer.Argument(
            help="The folder of a model that skipstone has trained or exported, or of exit heads; or the file of a profile of "
            "`skipstone search` or `skipstone tune`.",
            show_default=False,
        ),
    ],
    repo_id: Annotated[str, typer.Argument(help="The repository, ORG/NAME; made where there is none.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Only its owners may see the repository.")] = False,
    revision: Annotated[str | None, option("The branch, made where there is none. Default: main.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the card, and send nothing to the hub.")
    ] = False,
) -> None:
    """Upload a model, exit heads or a profile in one commit, with a card: base model, recipe, data, metrics, hashes."""
    path = path.expanduser()
    if not path.exists():
        raise FileNotFoundError(2, "no such file or folder", str(path))
    from skipstone.models.fetching import expect_repository

    expect_repository(repo_id)
    from skipstone.export.hub.push import card_of
    from skipstone.export.hub.push import push as upload
    from skipstone.export.hub.upload_contents import collect_upload

    if dry_run:
        contents = collect_upload(path)
        typer.echo(f"{contents.kind}, to {repo_id}:")
        for name, (size, sha) in contents.digests.items():
            typer.echo(f"  {name}  {size:,} bytes  {sha}")
        if contents.left_out:
            typer.echo(f"stays here: {', '.join(contents.left_out)}")
        typer.echo(f"\nREADME.md:\n\n{terminal.harmless(card_of(contents, repo_id, revision))}", nl=False)
        return
    typer.echo(upload(path, repo_id, private=private, revision=revision, say=lambda text: typer.echo(text, err=True)))
