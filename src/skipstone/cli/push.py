"""`skipstone push PATH REPO_ID`: upload a model, exit heads or a profile to the Hugging Face hub, with a card."""

from pathlib import Path

import typer

from skipstone.cli import terminal
from skipstone.cli.options import argument, option


def push(
    path: Path = argument("The folder of a trained or exported model or of exit heads, or a profile of `search` or `tune`."),
    repo_id: str = argument("The repository, ORG/NAME; made where there is none."),
    private: bool = option(False, "Only its owners may see the repository.", "--private"),
    revision: str | None = option(None, "The branch, made where there is none. Default: main."),
    dry_run: bool = option(False, "Print the files and the card, and send nothing to the hub.", "--dry-run"),
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
