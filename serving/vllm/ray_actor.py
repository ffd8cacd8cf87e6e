"""vLLM servers as Ray actors: each starts one on a GPU node, watches it and starts it again.

    python -m undertow.serving.vllm.ray_actor start --model /shared/model --count 2
    python -m undertow.serving.vllm.ray_actor status
    python -m undertow.serving.vllm.ray_actor stop

`start` prints the setting for shards, UNDERTOW_LLM_URL, with the actors' names: a server gets another URL
when its actor restarts on another node. It also prints the present URLs, for processes outside of the
cluster. The actors are detached: they outlive the program that started them, and Ray restarts an actor
whose process or node died. A server never outlives its actor.
"""

from __future__ import annotations

import logging
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from undertow.engine.base.model import UndertowError
from undertow.engine.llm.discovery import BY_NAME, NAMESPACE
from undertow.serving.vllm.local_server import SERVER_PYTHON, LocalServerError, LocalVLLM
from undertow.serving.vllm.supervisor import ServerState, ServerSupervisor

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util import get_node_ip_address, list_named_actors
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    raise UndertowError(
        "vLLM actors need Ray, which is not installed. Install it: pip install 'undertow[cluster]'"
    ) from None

NODE_RESOURCE = "undertow_vllm"
_NAME = "vllm-"
_ASK_S = 30.0


class ServerPlan(BaseModel):
    """What each server serves, and the resources that it takes of a node. Fields as in `LocalVLLM`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    from_hub: bool = False
    served_name: str | None = None
    max_model_len: int = Field(default=8_192, ge=1_024)
    # of the GPU; less if an engine's shard shares it
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    api_key: str | None = None
    extra_args: tuple[str, ...] = ()

    # whole GPUs are used together, by tensor parallelism; 0: a server on the CPU
    num_gpus: float = Field(default=1.0, ge=0)
    num_cpus: float = Field(default=1.0, ge=0)
    # a resource that only nodes with a vLLM environment have, as in ray_cluster.yaml; "" for any node
    node_resource: str = NODE_RESOURCE

    python: Path = SERVER_PYTHON
    # of the first server; the others take the next ones, so that several fit on a node. 0: any free ones
    port: int = Field(default=8_000, ge=0, le=65_000)
    kv_cache_gib: int = Field(default=2, ge=1)
    start_timeout_s: float = Field(default=900.0, gt=0)
    check_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _gpus_and_port_are_usable(self) -> ServerPlan:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus is {self.num_gpus}; above 1 it must be whole")
        if 0 < self.port < 1_024:
            raise ValueError(f"port is {self.port}; those below 1024 are the system's. 0 takes a free one")
        return self

    def demand(self) -> dict[str, float]:
        """What one server takes, by Ray's name of the resource."""
        demand = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        demand |= {self.node_resource: 1.0} if self.node_resource else {}
        return {name: amount for name, amount in demand.items() if amount}

    def server(self, number: int, host: str) -> LocalVLLM:
        """Server `number`, not started, which is to listen on `host`."""
        gpus = ["--gpu-memory-utilization", str(self.gpu_memory_utilization)] if self.num_gpus else []
        gpus += ["--tensor-parallel-size", str(int(self.num_gpus))] if self.num_gpus > 1 else []
        shared = self.model_dump(include={field.name for field in fields(LocalVLLM)})
        own: dict[str, Any] = {
            "served_name": self.served_name or Path(self.model).name,
            "host": host,
            "port": self.port and self.port + number,
            "eager": self.num_gpus == 0,
            "extra_args": (*gpus, *self.extra_args),
        }
        return LocalVLLM(**(shared | own))


class VLLMActor(ServerSupervisor):
    """A `ServerSupervisor` as Ray runs it."""

    def __init__(self, plan: ServerPlan, number: int) -> None:
        """Never fails: Ray does not restart an actor whose constructor raised."""
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        super().__init__(plan.server(number, host), check_s=plan.check_s)

    def url(self) -> str:
        """The server's URL; empty while it does not answer. Called by engines (`NamedActor`)."""
        return self.state().url


def start_servers(plan: ServerPlan, count: int) -> dict[str, str]:
    """The addresses for `llm_url` of `count` servers, and their URLs now; those that run stay as they are.

    Blocks until all answer. Raises LocalServerError with a server's last log lines, or with what the
    cluster lacks; the actors are left, and go on trying. None is made if no node may have one.
    """
    _check_nodes(plan)
    handles = {f"{_NAME}{number}": _actor(plan, number) for number in range(count)}
    # the actors may have to wait for a node that the autoscaler starts
    deadline_s = time.monotonic() + 2 * plan.start_timeout_s
    urls = {}
    for name, handle in handles.items():
        left_s = max(1.0, deadline_s - time.monotonic())
        try:
            urls[f"{BY_NAME}{name}"] = str(ray.get(handle.ready.remote(plan.start_timeout_s), timeout=left_s))
        except GetTimeoutError as waited:
            raise LocalServerError(_no_place(plan, count)) from waited
    return urls


def server_states() -> dict[str, ServerState]:
    """The state of every server, by its actor's name; `error` names an actor that does not answer."""
    asked = {name: _handle(name).state.remote() for name in _names()}
    states = {}
    for name, answer in asked.items():
        try:
            states[name] = ray.get(answer, timeout=_ASK_S)
        except RayError as trouble:
            states[name] = ServerState(error=f"the actor does not answer: {trouble}")
    return states


def stop_servers() -> int:
    """Ends all servers and their actors; returns their number."""
    handles = [_handle(name) for name in _names()]
    if handles:
        # an actor that does not answer is dead or not placed yet: the kill is enough
        ray.wait([handle.stop.remote() for handle in handles], num_returns=len(handles), timeout=_ASK_S)
    for handle in handles:
        ray.kill(handle, no_restart=True)
    return len(handles)


def _actor(plan: ServerPlan, number: int) -> Any:
    shell = ray.remote(VLLMActor).options(
        name=f"{_NAME}{number}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=8,  # `state` and `stop` are answered while `ready` waits
        num_cpus=plan.num_cpus,
        num_gpus=plan.num_gpus,
        resources={plan.node_resource: 1.0} if plan.node_resource else None,
    )
    return shell.remote(plan, number)


def _names() -> list[str]:
    found = [
        actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    ]
    return sorted((name for name in found if name.startswith(_NAME)), key=lambda name: (len(name), name))


def _handle(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def _check_nodes(plan: ServerPlan) -> None:
    """LocalServerError: no node has the resource; if more nodes may come, a warning on standard error."""
    from undertow.engine.cluster.settings import ClusterSettings  # needs more than the image of vLLM has

    held: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if not plan.node_resource or held.get(plan.node_resource, 0) >= 1:
        return
    cure = f"ray start --address=HEAD:6379 --resources='{{\"{plan.node_resource}\": 1}}'"
    lacking = (
        f"no node of the cluster has the resource {plan.node_resource}. Start Ray on a node that has vLLM: "
        f"`{cure}`, or permit any node: --node-resource ''"
    )
    if not ClusterSettings().autoscaling:
        raise LocalServerError(
            f"{lacking}. If an autoscaler adds such nodes, set UNDERTOW_CLUSTER_AUTOSCALING=true"
        )
    typer.echo(f"vllm_actor: waiting for the autoscaler: {lacking}", err=True)


def _no_place(plan: ServerPlan, count: int) -> str:
    asked = ", ".join(f"{name} {amount:g}" for name, amount in plan.demand().items())
    held: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    has = ", ".join(f"{name} {held.get(name, 0):g}" for name in plan.demand())
    return (
        f"{count} vLLM servers need {asked or 'nothing'} each, the cluster has {has or 'that'} in all, and "
        "not every server came up in time. Add nodes (ray_cluster.yaml has the type), or ask for less with "
        "--num-gpus, --num-cpus and --node-resource"
    )


cli = typer.Typer(add_completion=False, help="vLLM servers on the nodes of a Ray cluster.")
Address = Annotated[str, typer.Option(help="of a running cluster; `auto`: the one of this machine")]


def _connect(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)


@cli.command()
def start(
    model: Annotated[
        str, typer.Option(help="folder that every node can read, or a hub's name with --from-hub")
    ],
    count: Annotated[int, typer.Option(min=1)] = 1,
    address: Address = "auto",
    from_hub: bool = False,
    served_name: Annotated[
        str | None, typer.Option(help="default: the last part of the model's name")
    ] = None,
    num_gpus: Annotated[float, typer.Option(help="cards of a server; 0: it runs on CPUs")] = 1.0,
    num_cpus: float = 1.0,
    node_resource: Annotated[str, typer.Option(help="that vLLM nodes have; '' for any node")] = NODE_RESOURCE,
    python: Annotated[Path, typer.Option(help="of the nodes' vLLM environment")] = SERVER_PYTHON,
    port: Annotated[
        int, typer.Option(help="of the first server, the others take the next; 0: any free")
    ] = 8_000,
    max_model_len: int = 8_192,
    gpu_memory_utilization: float = 0.9,
    start_timeout_s: float = 900.0,
    vllm_arg: Annotated[list[str] | None, typer.Option(help="passed on to vLLM; repeat it")] = None,
) -> None:
    """Start servers, wait until they answer, and print the setting that names them.

    They ask for a key if UNDERTOW_LLM_API_KEY is set here. Servers that run already stay as they are.
    """
    from undertow.engine.base.config import Settings

    given = {name: value for name, value in locals().items() if name in ServerPlan.model_fields}
    try:
        key = Settings().llm_api_key
        api_key = None if key == Settings.model_fields["llm_api_key"].default else key
        plan = ServerPlan(**given, api_key=api_key, extra_args=tuple(vllm_arg or ()))
        _connect(address)
        urls = start_servers(plan, count)
    except (UndertowError, ValueError, ConnectionError, RayError) as error:
        typer.echo(f"vllm_actor: {error}", err=True)
        raise typer.Exit(1) from None
    for server, url in urls.items():
        typer.echo(f"{server} answers at {url}", err=True)
    typer.echo(f"UNDERTOW_LLM_URL={','.join(urls)}")


@cli.command()
def status(address: Address = "auto") -> None:
    """One line a server."""
    _connect(address)
    states = server_states()
    for name, state in states.items():
        word = "ready" if state.ready else "down"
        typer.echo("\t".join((name, word, state.url, f"starts {state.starts}", state.error or "")))
    raise typer.Exit(0 if all(state.ready for state in states.values()) else 1)


@cli.command()
def stop(address: Address = "auto") -> None:
    """End all servers and their actors."""
    _connect(address)
    typer.echo(f"{stop_servers()} servers stopped")


if __name__ == "__main__":
    # not the `cli` above: Ray would send the classes of __main__ by value
    from undertow.serving.vllm import ray_actor as vllm_actor

    vllm_actor.cli()
