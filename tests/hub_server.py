"""A small Hub on loopback: as much of the real one's interface as `huggingface_hub` uses for models.

Repositories live in memory as lists of commits. A large file (`.safetensors`, `.spm`) goes to a store of its own first
and into a commit by its hash; a commit is made whole or not at all.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard

# What a token may do: whose it is, and whether it writes.
TOKENS = {"hf_alice": ("alice", True), "hf_reader": ("alice", False), "hf_bob": ("bob", True)}
LARGE = (".safetensors", ".spm")


@dataclass
class Repository:
    """A model or a Space: who may see it, its commits {hash: {path: content}}, its branches {name: hash}."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    kind: str = "model"
    sdk: str | None = None

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """Add a commit to a branch; gives its hash."""
        oid = hashlib.sha1(f"{len(self.commits)}{branch}{message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    @property
    def files(self) -> dict[str, bytes]:
        """What `main` holds."""
        return self.commits[self.branches["main"]]


class Hub(ThreadingHTTPServer):
    """The server. `with Hub() as hub:` runs it in a thread.

    Attributes:
        repositories: {name: repository}.
        store: {sha256: content} of large files.
        uploads: hashes of the large files that arrived, in order.
        requests: (method, path) of every request.
        cut_uploads_after: large files that still arrive before the network is cut in the middle of one; `None`: all.
        cut_commit: break the connection `before` a commit is made, or `after`, so that only the answer is lost.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.store: dict[str, bytes] = {}
        self.datasets: set[str] = set()
        self.uploads: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.cut_uploads_after: int | None = None
        self.cut_commit: str | None = None
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


class Refusal(Exception):  # noqa: N818
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str = "", **content):
        super().__init__(message)
        self.status, self.code, self.content = status, code, {"error": message, **content}


def git_hash(content: bytes) -> str:
    """The hash by which git knows a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_hash(path: str, content: bytes) -> str:
    """The hash by which the Hub knows a file."""
    return hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else git_hash(content)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *arguments):
        """Silence."""

    def handle_any(self):
        """Find the route and answer."""
        url = urlsplit(self.path)
        self.server.requests.append((self.command, url.path))
        self.body = b""
        self.close_connection = False
        try:
            for method, pattern, route in ROUTES:
                if self.command in method.split() and (match := re.fullmatch(pattern, url.path)):
                    if route is not Handler.upload:
                        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    self.query = parse_qs(url.query)
                    parts = {name: unquote(part) for name, part in match.groupdict().items() if part is not None}
                    with self.server.lock:
                        return route(self, **parts)
            raise Refusal(404, f"no such page: {self.command} {url.path}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.content["error"]}
            self.answer(refusal.content, refusal.status, {name: value for name, value in headers.items() if value})
        except ConnectionError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def answer(self, content: object = None, status: int = 200, headers: dict[str, str] | None = None):
        """JSON, or bytes as they are."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def cut(self):
        """The network is gone."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionError

    def user(self) -> tuple[str | None, bool]:
        """Who asks, and whether they may write."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise Refusal(401, "Invalid username or password.")
        return TOKENS.get(token, (None, False))

    def repository(self, name: str, *, write: bool = False) -> Repository:
        """A repository that who asks may see, or write to."""
        user, writes = self.user()
        repository = self.server.repositories.get(name)
        owner = name.partition("/")[0] == user
        if repository is None or (repository.private and not owner):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not (owner and writes):
            raise Refusal(403, "Forbidden: pass a token with write access to this repository")
        return repository

    def revision(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The hash that a branch's name or a hash means, and its files."""
        repository = self.repository(name)
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repository.commits[oid]

    def whoami(self):
        name, _ = self.user()
        if name is None:
            raise Refusal(401, "Invalid username or password.")
        self.answer({"type": "user", "name": name, "orgs": []})

    def create(self):
        wanted = json.loads(self.body)
        user, writes = self.user()
        owner = wanted.get("organization") or user
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if owner != user or not writes:
            raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        name = f"{owner}/{wanted['name']}"
        url = f"{self.server.endpoint}/{name}"
        if name in self.server.datasets:
            raise Refusal(409, "You already created this dataset repo", url=f"{self.server.endpoint}/datasets/{name}")
        if name in self.server.repositories:
            raise Refusal(409, "You already created this model repo", url=url)
        repository = self.server.repositories[name] = Repository(wanted.get("visibility") == "private")
        repository.kind, repository.sdk = wanted.get("type", "model"), wanted.get("sdk")
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.answer({"url": url, "name": name, "id": name})

    def branch(self, name: str, branch: str):
        repository = self.repository(name, write=True)
        if branch in repository.branches:
            raise Refusal(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        self.answer({})

    def info(self, name: str, revision: str = "main"):
        oid, files = self.revision(name, revision)
        self.answer(
            {
                "_id": "0",
                "id": name,
                "modelId": name,
                "sha": oid,
                "private": self.server.repositories[name].private,
                "siblings": [{"rfilename": path} for path in files],
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )

    def tree(self, name: str, revision: str, folder: str = ""):
        if folder:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        entries = []
        for path, content in self.revision(name, revision)[1].items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": file_hash(path, content), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self.answer(entries)

    def validate(self):
        try:
            ModelCard(json.loads(self.body)["content"])
        except ValueError as error:
            raise Refusal(400, "Bad request", errors=[{"message": str(error)}]) from None
        self.answer({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str):
        self.repository(name, write=True)
        _, there = self.revision(name, revision)
        files = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            mode = "lfs" if path.endswith(LARGE) else "regular"
            known = {"oid": file_hash(path, there[path])} if path in there else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        self.answer({"files": files})

    def batch(self, name: str):
        self.repository(name, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.server.endpoint}/upload/{wanted['oid']}"}
            objects.append(wanted | ({} if wanted["oid"] in self.server.store else {"actions": {"upload": upload}}))
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, oid: str):
        length, left = int(self.headers["Content-Length"]), self.server.cut_uploads_after
        if left == 0:
            self.rfile.read(length // 2)
            self.cut()
        content = self.rfile.read(length)
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "another file than announced")
        self.server.cut_uploads_after = None if left is None else left - 1
        self.server.store[oid] = content
        self.server.uploads.append(oid)
        self.answer({})

    def commit(self, name: str, branch: str):
        repository = self.repository(name, write=True)
        if self.server.cut_commit == "before":
            self.cut()
        files, header = None, None
        for line in self.body.splitlines():
            key, value = json.loads(line).values()
            if key == "header":
                header, parent = value, repository.branches[branch]
                if value.get("parentCommit", parent) != parent:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
                files = dict(repository.commits[parent])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.server.store:
                    raise Refusal(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.server.store[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"unknown operation {key}")
        oid = repository.commit(branch, files, header["summary"])
        if self.server.cut_commit == "after":
            self.cut()
        url = f"{self.server.endpoint}/{'spaces/' * (repository.kind == 'space')}{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url})

    def resolve(self, name: str, revision: str, path: str):
        oid, files = self.revision(name, revision)
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        content = files[path]
        self.answer(content, headers={"ETag": f'"{file_hash(path, content)}"', "X-Repo-Commit": oid})


NAME, REVISION = r"(?P<name>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("GET", rf"/api/(?:models|spaces)/{NAME}", Handler.info),
    ("GET", rf"/api/(?:models|spaces)/{NAME}/revision/{REVISION}", Handler.info),
    ("GET", rf"/api/(?:models|spaces)/{NAME}/tree/{REVISION}(?:/(?P<folder>.+))?", Handler.tree),
    ("POST", rf"/api/(?:models|spaces)/{NAME}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", rf"/api/(?:models|spaces)/{NAME}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/api/(?:models|spaces)/{NAME}/commit/(?P<branch>[^/]+)", Handler.commit),
    ("POST", r"/(?:spaces/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})", Handler.upload),
    ("GET HEAD", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]
