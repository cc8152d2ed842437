"""A Kubernetes API server for one kind of object: JobSets, kept in memory, checked by the schema of their CRD."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slicewise.errors import UserError
from slicewise.launch.jobset_schema import validate

PREFIX = ["apis", "jobset.x-k8s.io", "v1alpha2", "namespaces"]
REASONS = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid", 500: "InternalError"}


class KubernetesApi:
    """``answer`` is a status that every call gets instead, for as long as it is set."""

    def __init__(self):
        self.objects = {}  # (namespace, name) -> manifest
        self.calls = []  # method, path, authorization
        self.answer = None
        self.version = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                path = self.path.partition("?")[0]
                api.calls.append((self.command, path, self.headers.get("Authorization")))
                status, document = api.respond(self.command, path.strip("/").split("/"), body)
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, format, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def respond(self, method, parts, body):
        if self.answer:
            return failure(self.answer, f"injected {self.answer}")
        if parts[:4] != PREFIX or len(parts) not in (6, 7) or parts[5] != "jobsets":
            return failure(404, "the server could not find the requested resource")
        namespace, name = parts[4], parts[6] if len(parts) == 7 else None
        if namespace == "missing":
            return failure(404, f'namespaces "{namespace}" not found')
        if method == "POST" and name is None:
            return self.create(namespace, body)
        if (namespace, name) not in self.objects:
            return failure(404, f'jobsets.jobset.x-k8s.io "{name}" not found')
        if method == "DELETE":
            del self.objects[namespace, name]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, self.objects[namespace, name]

    def create(self, namespace, body):
        name = body["metadata"]["name"]
        if (namespace, name) in self.objects:
            return failure(409, f'jobsets.jobset.x-k8s.io "{name}" already exists')
        try:
            validate(body)
        except UserError as error:
            return failure(422, str(error))
        self.version += 1
        made = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        self.objects[namespace, name] = made
        return 201, made


def failure(status, message):
    return status, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(status, "Unknown"),
        "code": status,
    }


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    """A running API server, and a kubeconfig that names it."""
    api = KubernetesApi()
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": {"server": api.url}}],
                "users": [{"name": "me", "user": {"token": "a-secret-token"}}],
            }
        )
    )
    config.chmod(0o600)
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    yield api
    api.close()
