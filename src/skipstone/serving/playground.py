"""The playground: one page of static files, which talks to the other routes."""

from importlib.resources import files

from fastapi import FastAPI, Response
from starlette.routing import Route

SCRIPTS = ("page", "view", "figures", "map", "bench", "dom")
"""The page's scripts, of which the first one imports the others."""
PATHS = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
}
"""Routes, each with its file and that file's type. They hold nothing secret: a browser has to get them without a key."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Nothing comes from elsewhere, and nothing in the page runs that is not in its files: model text cannot become a script."""
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
HEADERS["Referrer-Policy"] = "no-referrer"


def add(app: FastAPI) -> None:
    """Add the page's routes. Its files are read once, here."""
    folder = files("skipstone.serving") / "page"
    for path, (name, kind) in PATHS.items():
        page = Response((folder / name).read_bytes(), media_type=kind, headers=HEADERS)
        app.router.routes.append(Route(path, page, methods=["GET"], include_in_schema=False))
