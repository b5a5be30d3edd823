"""Run `finlm board`: serve runs, recipes and hosts as pages in the browser, with starlette and uvicorn.

Listens at 127.0.0.1; elsewhere, or with --allow-actions, only behind a token. A page reads what the commands read, with
their functions; nothing is written without --allow-actions. Runs and recipes are looked up in a listing, so that no
path is ever built from an address.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from finlm.base import language, processes, screen
from finlm.base.errors import UserError
from finlm.board import pages
from finlm.board.pages import Missing, Page
from finlm.recipe import cluster, derive
from finlm.record.report import run_page as report

if TYPE_CHECKING:
    from finlm.inference.chat import Talker

LOCAL = ("127.0.0.1", "localhost", "::1")
_MOST_BYTES = 2**16  # of what a browser may send
_STATIC = {
    "report.css": report.FILES / "report.css",
    "report.js": report.FILES / "report.js",
    "board.css": pages.FILES / "board.css",
    "board.js": pages.FILES / "board.js",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# Scripts of a report run in an origin of their own, where they reach nothing.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
)


@dataclass(frozen=True)
class Settings:
    """The settings of the server.

    `token` is None if none is needed, `csrf` is a secret that changes with every start.
    """

    board: pages.Board
    lang: str = "en"
    host: str = "127.0.0.1"
    token: str | None = None
    csrf: str = field(default_factory=secrets.token_urlsafe)  # of this process


def run(options: argparse.Namespace) -> int:
    """Run `finlm board`: print the address and serve the pages until Ctrl-C. Return 0.

    Sets HF_HUB_OFFLINE, so that no page uses the network. Raises UserError for a port that cannot be listened on, a
    directory or hostfile that cannot be read, or a token that is too short.
    """
    if options.runs.exists() and not (options.runs.is_dir() and os.access(options.runs, os.R_OK | os.X_OK)):
        raise UserError(f"--runs: {options.runs} is no directory that can be read", fix="give a directory of runs")
    if options.hostfile is not None:
        cluster.load(options.hostfile)
    os.environ["HF_HUB_OFFLINE"] = "1"  # no page load goes to the network
    board = pages.Board(options.runs, options.hostfile, options.allow_actions)
    settings = Settings(board, language.current(), options.host, _token(options))
    with processes.listen(options.host, options.port) as listening:
        where = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{where}:{listening.getsockname()[1]}/"
        screen.show(address + (f"?{urlencode({'token': settings.token})}" if settings.token else ""))
        screen.say("Ctrl-C ends it")
        threading.Thread(target=pages.list_lines, args=[board], daemon=True).start()  # the first look finds them read
        screen.flush()
        config = uvicorn.Config(app(settings), log_level="warning", timeout_graceful_shutdown=2, server_header=False)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    return 0


def _token(options: argparse.Namespace) -> str | None:
    """Return the token of --token-file, else a random one if one is needed, else None.

    A token is needed with another address than LOCAL and with --allow-actions. Raises UserError for a file whose token
    is too short or not ASCII, OSError for one that cannot be read.
    """
    if options.token_file is not None:
        token = options.token_file.read_text(encoding="utf-8", errors="replace").strip()
        if len(token) < 16 or not token.isascii():
            raise UserError(
                f"--token-file: {options.token_file} holds no token",
                evidence=f"{len(token)} characters",
                fix="at least 16 ASCII characters; without --token-file a token is made and printed",
            )
        return str(token)
    return secrets.token_urlsafe(24) if options.host not in LOCAL or options.allow_actions else None


def app(settings: Settings) -> Starlette:
    """Return the starlette application: the routes of all pages, behind _Site.guard."""
    site = _Site(settings)
    routes = [
        Route("/", site.page(lambda board, ask: pages.runs(board, ask.get("q", "")))),
        Route("/runs/{name}", site.page(_run, reads_runs=True)),
        Route("/runs/{name}/report", site.report),
        Route("/compare", site.page(_compare, reads_runs=True)),
        Route("/recipes", site.page(lambda board, ask: pages.recipes(board))),
        Route("/recipes/plan", site.page(lambda board, ask: pages.plan(board, ask))),
        Route("/recipes/diff", site.page(lambda board, ask: pages.diff(board, ask.get("a", ""), ask.get("b", "")))),
        Route("/recipes/view/{name:path}", site.page(lambda board, ask: pages.recipe(board, ask["name"], ask))),
        Route("/hosts", site.page(lambda board, ask: pages.hosts(board))),
        Route("/docs/{name}", site.docs),
        Route("/static/{name}", _static),
        Route("/recipes/fork", site.fork, methods=["POST"]),
        Route("/runs/{name}/chat", site.page(lambda board, ask: pages.chat(board, ask["name"]))),
        Route("/runs/{name}/chat", site.answer, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=site.guard)],
        exception_handlers={HTTPException: site.show_refusal, Missing: site.show_missing, Exception: site.show_bug},
    )


class Asked(dict[str, str]):
    """What a request asks for: its query parameters, the names in its path, and `lang`, "en" or "zh"."""

    def __init__(self, request: Request, lang: str) -> None:
        """Take query and path parameters of the request, and the page's language."""
        super().__init__(request.query_params)
        self.update({name: str(value) for name, value in request.path_params.items()}, lang=lang)
        self.getlist = request.query_params.getlist


def _run(board: pages.Board, ask: Asked) -> Page:
    """Return the page of the run that the address names. Raises as pages.run() does."""
    return pages.run(board, ask["name"], ask["lang"])


def _compare(board: pages.Board, ask: Asked) -> Page:
    """Return the page that compares the runs that the query names. Raises as pages.compare() does."""
    return pages.compare(board, ask.getlist("run"))


def _cookie(request: Request) -> str:
    """Return the name of the token's cookie; it includes the port, because browsers share cookies between ports."""
    return f"finlm-board-{request.url.port}"


class _Site:
    """The handlers of all requests, by the settings, and the models that chat."""

    def __init__(self, settings: Settings) -> None:
        """Keep the settings; no model is loaded yet."""
        self.settings = settings
        self.talk = Talk()

    async def guard(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Return the response to a request, or an error page if it is not admitted (400, 401, 403 or 413).

        Adds the security headers to every response; stores ?lang= of the address in a cookie.
        """
        try:
            response = self._admit(request) or await call_next(request)
        except HTTPException as error:
            response = self.show_refusal(request, error)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        if request.query_params.get("lang") in ("en", "zh"):
            response.set_cookie("finlm-lang", request.query_params["lang"], samesite="strict", httponly=True)
        return response

    def _admit(self, request: Request) -> Response | None:
        """Return None for an admitted request, or the redirect that sets the token's cookie.

        Raises HTTPException for a foreign Host header (400), another site's request that does not navigate (403), a
        POST that is not allowed (403) or too long (413), and a missing or wrong token (401).
        """
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if not self._is_own(host):  # a page elsewhere may have made its name point here
            raise HTTPException(400, f"this board does not answer to the name {host!r}")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and request.headers.get("sec-fetch-mode") != "navigate":
            raise HTTPException(403, "asked by another site")
        if request.method not in ("GET", "HEAD"):
            self._check_post(request, site)
        token = self.settings.token
        if token is None:
            return None
        if "token" in request.query_params and hmac.compare_digest(
            request.query_params["token"].encode(), token.encode()
        ):
            rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
            answer = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), 303)
            answer.set_cookie(_cookie(request), token, httponly=True, samesite="strict")
            return answer
        if not hmac.compare_digest(request.cookies.get(_cookie(request), "").encode(), token.encode()):
            raise HTTPException(401, "open the address with ?token=... that `finlm board` printed")
        return None

    def _is_own(self, host: str) -> bool:
        """Return whether the name in a Host header is this board's.

        A name of LOCAL is. If the board listens elsewhere, so are any IP address, as DNS rebinding needs a name, and
        this machine's names.
        """
        if host in LOCAL or self.settings.host in LOCAL:
            return host in LOCAL
        try:
            return bool(ipaddress.ip_address(host))
        except ValueError:
            return host.lower() in {
                name.lower() for name in (self.settings.host, socket.gethostname(), socket.getfqdn())
            }

    def _check_post(self, request: Request, site: str) -> None:
        """Raise HTTPException for a POST: 403 without --allow-actions, from elsewhere or without this start's csrf.

        413 if its length is unknown or over _MOST_BYTES.
        """
        if not self.settings.board.allow_actions:
            raise HTTPException(403, "this board reads only; `finlm board --allow-actions` does more")
        origin = request.headers.get("origin", "")
        if site != "same-origin" and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "asked by another site")
        if not hmac.compare_digest(request.headers.get("x-csrf", "").encode(), self.settings.csrf.encode()):
            raise HTTPException(403, "the page is of another start of the board: load it again")
        if not 0 <= int(request.headers.get("content-length") or -1) <= _MOST_BYTES:
            raise HTTPException(413, f"at most {_MOST_BYTES:,} bytes")

    def page(
        self, make: Callable[[pages.Board, Any], Page], *, reads_runs: bool = False
    ) -> Callable[[Request], Response]:
        """Return the endpoint that renders the page that `make` returns; a UserError becomes an error page (422).

        With reads_runs, errors of damaged run files (DAMAGED) become error pages too instead of being raised as bugs.
        """

        def answer(request: Request) -> Response:
            """Return the rendered page with status 200; for a UserError its error page with 422.

            If the query has `part`, as board.js asks for it, the error page has 200 too.
            """
            lang = self._lang(request)
            ask = Asked(request, lang)
            try:
                return self._render(request, make(self.settings.board, ask), 200, lang)
            except UserError as error:
                wrong = error
            except pages.DAMAGED as error:
                if not reads_runs:
                    raise
                wrong = pages.damage_error([ask["name"]] if "name" in ask else ask.getlist("run"), error)
            return self._render(request, pages.problem(wrong), 200 if "part" in ask else 422, lang)

        return answer

    def _render(self, request: Request, made: Page, status: int, lang: str) -> Response:
        """Return the page as HTML with this status, or an empty 304 if the browser has the same page already (ETag)."""
        csrf = self.settings.csrf if status == 200 else ""  # for those alone who were let in
        text = pages.render(made, self.settings.board, lang, csrf)
        mark = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        if status == 200 and request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers={"ETag": mark})
        return HTMLResponse(text, status, {"ETag": mark})

    def _lang(self, request: Request) -> str:
        """Return the request's language: ?lang=, else the cookie, else the server's."""
        asked = request.query_params.get("lang") or request.cookies.get("finlm-lang")
        return asked if asked in ("en", "zh") else self.settings.lang

    def show_refusal(self, request: Request, error: Exception) -> Response:
        """Return the error page of `error`, which must be an HTTPException, with its status."""
        assert isinstance(error, HTTPException)
        made = pages.problem(
            UserError(f"{error.status_code} {HTTPStatus(error.status_code).phrase}", evidence=error.detail)
        )
        return self._render(request, made, error.status_code, self._lang(request))

    def show_missing(self, request: Request, error: Exception) -> Response:
        """Return the error page (404) for a name that is not listed."""
        return self.show_refusal(request, HTTPException(404, str(error)))

    def show_bug(self, request: Request, error: Exception) -> Response:
        """Return the error page (500) for a bug; its traceback goes to the terminal."""
        fix = "its traceback is on the terminal of `finlm board`"
        made = pages.problem(UserError("this page could not be made", evidence=type(error).__name__, fix=fix))
        answer = self._render(request, made, 500, self._lang(request))
        answer.headers.update(_HEADERS)
        return answer

    def report(self, request: Request) -> Response:
        """Return a run's report.html, sandboxed. Raises HTTPException (404) without one, Missing for an unknown run."""
        path = pages.report_of(pages.find_run(self.settings.board, request.path_params["name"]))
        if path is None:
            raise HTTPException(404, "this run has no report")
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": _REPORT_POLICY})

    def docs(self, request: Request) -> Response:
        """Return a page of docs/ as plain text. Raises HTTPException (404) if there is none."""
        path = pages.find_docs(request.path_params["name"], self._lang(request))
        if path is None:
            raise HTTPException(404, "no such page")
        return PlainTextResponse(path.read_text("utf-8"))

    async def fork(self, request: Request) -> Response:
        """Save a fork of a recipe by the posted form; return JSON {"path"}, or {"problem"} if it was not saved.

        The form has recipe, name and set, as save_fork() reads them. An unknown recipe gives status 404.
        """
        form = dict(parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True))
        return await self._act(request, lambda: {"path": save_fork(self.settings.board, form)})

    async def answer(self, request: Request) -> Response:
        """Return a model's answer to the posted conversation as JSON {"text"}, or {"problem"} if there is none.

        Loads the model in a thread if it is not the last one that was used. An unknown run gives status 404.
        """
        body, name = await request.body(), request.path_params["name"]
        return await self._act(request, lambda: {"text": self.talk.answer(self.settings.board, name, body)})

    async def _act(self, request: Request, act: Callable[[], dict[str, str]]) -> Response:
        """Return the result of act(), called in a thread, as JSON.

        A UserError or OSError becomes {"problem"}, a UserError in the request's language; Missing becomes that with
        status 404.
        """
        try:
            return JSONResponse(await run_in_threadpool(act))
        except Missing as error:
            return JSONResponse({"problem": str(error)}, 404)
        except UserError as error:  # an answer to be read, no failure for a browser to log
            lines = filter(None, (error.problem, error.evidence, error.fix))
            return JSONResponse({"problem": "\n".join(language.translate(line, self._lang(request)) for line in lines)})
        except OSError as error:
            return JSONResponse({"problem": f"{error.filename}: {error.strerror}"})


def _static(request: Request) -> Response:
    """Return a file of the pages' style or scripts. Raises HTTPException (404) for another name."""
    path = _STATIC.get(request.path_params["name"])
    if path is None:
        raise HTTPException(404, "no such file")
    return FileResponse(path, headers={"Cache-Control": "no-cache"})


# What the board does beside reading, with --allow-actions only

_TEMPERATURE, _TOKENS = 0.7, 256


def save_fork(board: pages.Board, form: Mapping[str, str]) -> str:
    """Write recipes/NAME/<file>, a fork of the form's recipe with its values, and return the path.

    `form` has `recipe`, `name` and, in `set`, lines KEY=VALUE. Raises Missing for an unknown recipe, UserError for an
    invalid or taken name or bad values.
    """
    wanted = pages.Wanted.read(board, form.get("recipe", ""), form)
    pages.find_recipe(wanted.name)
    return str(derive.fork(form.get("name", ""), Path(wanted.name), overrides=wanted.overrides))


class Talk:
    """Answers chat requests, one at a time; keeps the last loaded model in memory."""

    def __init__(self) -> None:
        """Begin without a model."""
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._talker: Talker | None = None

    def answer(self, board: pages.Board, name: str, body: bytes) -> str:
        """Return the model's answer to the conversation in `body`, JSON {"messages": [{"role", "content"}, ...]}.

        Without a chat template, a continuation of its last message. Loads the exported model of the run `name`, unless
        it chatted last. Waits for other answers. Raises Missing for an unknown run, and UserError for a body without a
        conversation or a model that cannot be opened or cannot answer.
        """
        run, messages = pages.find_run(board, name), _messages(body)
        with self._lock:
            if (run.export / "chat_template.jinja").is_file():
                return self._open(Path(run.export)).ask(messages, _TEMPERATURE, _TOKENS).text
            from finlm.inference import export  # loads torch

            return export.sample_text(run.export, messages[-1]["content"], tokens=64)

    def _open(self, path: Path) -> Talker:
        """Return the Talker of a model directory; loads the model unless it was used last. UserError if that fails."""
        from finlm.inference.chat import Talker  # loads torch
        from finlm.inference.open import open_model

        if self._talker is None or self._path != path:
            self._talker = None  # memory for one model is enough
            self._path, self._talker = path, Talker(open_model(path))
        return self._talker


def _messages(body: bytes) -> list[dict[str, str]]:
    """Return [{role, content}] of a JSON request body {"messages": [...]}.

    Raises UserError for other JSON, no messages, roles other than user and assistant, or an empty last message.
    """
    try:
        sent: Any = orjson.loads(body)
        found = [{"role": str(row["role"]), "content": str(row["content"])} for row in sent["messages"]]
    except (ValueError, KeyError, TypeError):
        found = []
    if not found or any(row["role"] not in ("user", "assistant") for row in found) or not found[-1]["content"].strip():
        raise UserError("no conversation was sent", fix="write something")
    return found
