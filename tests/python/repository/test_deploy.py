"""The files in deploy/: Kubernetes would take the manifests, systemd the units, and each command line is one that
`pathways` understands. No network is needed: kubernetes-validate brings the published schemas.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import types
from collections.abc import Iterator
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from pathways.cli import main
from pathways.cli.joining import tell_how_to_join
from pathways.cluster.launcher import Listening

DEPLOY = pathlib.Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
PAGES = [DEPLOY.parent / "docs" / f"{name}.md" for name in ("kubernetes", "slurm", "systemd")]
COMMAND = re.compile(r"(?<![\w./$:{-])(?<!-u )(?:/opt/pathways/bin/)?pathways ([a-z]+\b[^|;>&)]*)")
OLDEST = "1.30"  # of Kubernetes, that the manifests are for


def documents(path: pathlib.Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def base() -> list[dict[str, Any]]:
    kustomization = documents(KUBERNETES / "base/kustomization.yaml")[0]
    return [each for name in kustomization["resources"] for each in documents(KUBERNETES / "base" / name)]


def operations_in(path: pathlib.Path) -> list[dict[str, Any]]:
    operations = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {each["op"] for each in operations} <= {"add", "replace"}
    return operations


def patched(document: Any, operations: list[dict[str, Any]]) -> Any:
    """A document after the `add` and `replace` operations of a JSON patch (RFC 6902)."""
    for operation in operations:
        *path, last = [key.replace("~1", "/") for key in operation["path"].strip("/").split("/")]
        place = document
        for key in path:
            place = place[int(key)] if isinstance(place, list) else place[key]
        if isinstance(place, list) and operation["op"] == "add":
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        elif isinstance(place, list):
            place[int(last)] = operation["value"]
        else:
            assert operation["op"] == "add" or last in place, f"nothing to replace at {operation['path']}"
            place[last] = operation["value"]
    return document


def with_gpus() -> list[dict[str, Any]]:
    """The documents of the overlay gpu, as kustomize makes them."""
    found = base()
    for patch in documents(KUBERNETES / "gpu/kustomization.yaml")[0]["patches"]:
        wanted = (patch["target"]["kind"], patch["target"]["name"])
        (target,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == wanted]
        patched(target, operations_in(KUBERNETES / "gpu" / patch["path"]))
    return found


VARIANTS = {"base": base, "gpu": with_gpus}


def container(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (document,) = [each for each in found if each["kind"] == kind]
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


def options(arguments: list[str]) -> dict[str, str]:
    return dict(each.removeprefix("--").split("=", 1) for each in arguments if each.startswith("--"))


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_manifests_follow_the_published_schemas(variant: str, version: str) -> None:
    found = VARIANTS[variant]()
    assert sorted(each["kind"] for each in found) == [
        "Deployment",
        "PersistentVolumeClaim",
        "Service",
        "Service",
        "StatefulSet",
    ]
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_manifest_is_found() -> None:
    found = base()
    container(found, "StatefulSet")["securityContext"]["runAsRoot"] = False
    (agents,) = [each for each in found if each["kind"] == "StatefulSet"]
    with pytest.raises(kubernetes_validate.ValidationError, match="runAsRoot"):
        kubernetes_validate.validate(agents, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_controller_and_agents_agree(variant: str) -> None:
    found = VARIANTS[variant]()
    (agents,) = [each for each in found if each["kind"] == "StatefulSet"]
    up, agent = container(found, "Deployment")["args"], container(found, "StatefulSet")["args"]
    assert int(options(up)["islands"]) == agents["spec"]["replicas"]
    assert options(up)["hosts-per-island"] == options(agent)["hosts"]
    assert options(up)["devices-per-host"] == options(agent)["devices-per-host"]
    assert options(up).get("platform") == options(agent).get("platform")
    gpus = container(found, "StatefulSet")["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert gpus == (int(options(agent)["hosts"]) * int(options(agent)["devices-per-host"]) if variant == "gpu" else 0)
    (service,) = [
        each for each in found if each["metadata"]["name"] == "pathways-controller" and "ports" in each["spec"]
    ]
    assert agent[2] == f"pathways://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_pods_have_no_rights_that_they_do_not_need(kind: str) -> None:
    (document,) = [each for each in base() if each["kind"] == kind]
    pod = document["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    # Kubernetes would open private files to the group at each start, and Pathways refuses such files.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (only,) = pod["containers"]
    rights = only["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user and {int(user[1])} == {int(user[2])} == {pod["securityContext"]["runAsUser"]}


def test_the_probe_of_an_agent_looks_for_a_socket_that_agents_have(root: pathlib.Path) -> None:
    (_, _, look) = container(base(), "StatefulSet")["readinessProbe"]["exec"]["command"]
    name = look.rpartition("/")[2]
    assert f'"{name}"' in (root / "pathways/agent/main.py").read_text(encoding="utf-8")


def command_lines(path: pathlib.Path) -> Iterator[list[str]]:
    """The words behind each `pathways` that begins a command in a file, up to the command's end."""
    if path.suffix == ".yaml":
        found = [*base(), *with_gpus()] if path.name == "kustomization.yaml" else []
        for document in found:
            for only in document["spec"].get("template", {}).get("spec", {}).get("containers", []):
                yield only["args"][1:]
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    words = only.get(probe, {}).get("exec", {}).get("command", [])
                    if words[:1] == ["pathways"]:
                        yield words[1:]
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^ *```(?:sh|ini)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL))
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for match in COMMAND.finditer(line):
            yield shlex.split(match[1].replace("'", " "))


def unknown_options(words: list[str]) -> list[str]:
    """The options of a command line that the command does not have."""
    command: click.Command = main
    context = click.Context(command)
    unknown = []
    for word in words:
        if isinstance(command, click.Group) and (found := command.get_command(context, word)) is not None:
            command = found
        elif command is main:
            unknown.append(word)
        elif word.startswith("--"):
            known = {name for each in command.get_params(context) for name in each.opts}
            unknown += [] if word.split("=")[0] in known else [f"{command.name} {word}"]
    return unknown


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.relative_to(DEPLOY.parent).as_posix())
def test_every_option_exists(path: pathlib.Path) -> None:
    assert [fault for words in command_lines(path) for fault in unknown_options(words)] == []


def test_the_commands_are_found() -> None:
    """The check above sees them, and would see a wrong one."""
    found = {path.name: list(command_lines(path)) for path in [*FILES, *PAGES]}
    assert [words[0] for words in found["pathways.sbatch"]] == ["agent", "up", "token", "status"]
    assert [words[0] for words in found["pathways-controller.service"]] == ["up"]
    assert [words[0] for words in found["pathways-agent.service"]] == ["agent"]
    assert {words[0] for words in found["kustomization.yaml"]} == {"up", "agent", "status"}
    assert [words[0] for words in found["kubernetes.md"]] == ["token", "status", "token"]
    assert [words[0] for words in found["systemd.md"]] == ["token", "status", "token"]
    assert unknown_options(["ups"]) == ["ups"]
    assert unknown_options(["up", "--listen", "h:1", "--islnads", "2"]) == ["up --islnads"]
    assert unknown_options(["token", "--role", "host", "list", "--json", "--uses"]) == ["list --uses"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_batch_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm/pathways.sbatch")], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_batch_script_finds_the_port(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In what `pathways up` says into a file. That names this machine, because nobody elsewhere can call 0.0.0.0."""
    handle: Any = types.SimpleNamespace(port="pathways://0.0.0.0:4711")
    tell_how_to_join(Listening("0.0.0.0:0"), handle)
    (tmp_path / "log").write_text(capsys.readouterr().err)
    assert f"machines join at pathways://{socket.gethostname()}:4711; " in (tmp_path / "log").read_text()
    lines = (DEPLOY / "slurm/pathways.sbatch").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("port=")]
    command = ["bash", "-c", f"private={tmp_path}; {line}; echo $port"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "4711\n"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_units_have_what_they_name(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    given = set(re.findall(r"(\w+)=", " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE))))
    used = set(re.findall(r"\$\{?([A-Z_]+)", text))
    # CONTROLLER has no default: each cluster has its own. systemd sets CREDENTIALS_DIRECTORY.
    assert used - given <= {"CONTROLLER", "CREDENTIALS_DIRECTORY"}
    for folder in re.findall(r"/var/lib/([\w-]+)/", text):
        assert f"\nStateDirectory={folder}\n" in text
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict", "Restart=on-failure"} <= set(text.splitlines())
