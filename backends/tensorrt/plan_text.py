"""What a plan says about itself. A plan is opaque without a GPU, but it holds readable text: each graph it was compiled to, with
its architecture, inputs, constants and list of kernels. Tests assert by it what was fused and how many bits a payload has, and a
build reads from it what memory the plan needs.

There is a graph a profile, and one more without an architecture (`*`) for each product that is compiled on the device. The format
is TensorRT-RTX's own and nowhere documented: what is read here was seen in version 1.7.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Graph", "Kernel", "Payload", "PlanText", "read_plan"]

_NAME = re.compile(r'"([^"]*)"')
_REGION = re.compile(r"region = \{ name=\S+ size=(\d+) .*?type=user place=accelerator")
_PAYLOAD = re.compile(
    r'tensor=\{[^}]*?const_payload_size=(\d+) dims=\{([^}]*)\} name="([^"]*)"[^\n]*?type=(\w+)'
)
_KERNEL = re.compile(r"^\s+(\w+)=\{ name=(\"[^\"]*\"|\S+) (.*)$")
_SUFFIX = re.compile(r"( \[profile \d+\])?\.\d+(_\d+)?$")


@dataclass(frozen=True)
class Payload:
    """A constant: bytes, sizes, and type as the library writes it (half, int4 …)."""

    name: str
    size: int
    dims: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class Kernel:
    """A step of a graph. kind: `function` (a compiled kernel), `runtime_fusion` (a product with what is fused into it),
    `fully_connected` (a product alone) or another. `name` lists what was fused, as `__myl_ReplCastMulCastFc`; inputs by tensor
    name."""

    kind: str
    name: str
    inputs: tuple[str, ...]

    @property
    def multiplies(self) -> bool:
        """Whether it holds a product of matrices."""
        return self.kind in ("fully_connected", "runtime_fusion") or "Fc" in self.name


@dataclass(frozen=True)
class Graph:
    """One compiled graph. scratch: bytes of device memory for what lies between kernels."""

    architectures: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    payloads: tuple[Payload, ...]
    kernels: tuple[Kernel, ...]
    scratch: int

    @property
    def aliased(self) -> set[str]:
        """Outputs that are updated in place: the library lists them as inputs, too."""
        return set(self.inputs) & set(self.outputs)

    def attentions(self) -> list[Kernel]:
        """Fused attention kernels."""
        return [kernel for kernel in self.kernels if "_mha_v" in kernel.name]

    def readers(self, payload: str) -> list[Kernel]:
        """The kernels that read a constant."""
        return [kernel for kernel in self.kernels if payload in kernel.inputs]


@dataclass(frozen=True)
class PlanText:
    """The graphs of a plan that were compiled for architectures, in the order of the profiles."""

    graphs: tuple[Graph, ...]

    @property
    def architectures(self) -> list[str]:
        return sorted({name for graph in self.graphs for name in graph.architectures})

    @property
    def scratch(self) -> int:
        """Device memory of one execution context: that of the graph which needs most."""
        return max((graph.scratch for graph in self.graphs), default=0)

    @functools.cached_property
    def payloads(self) -> list[Payload]:
        """Every constant once: graphs share what they name alike."""
        return list(dict.fromkeys(payload for graph in self.graphs for payload in graph.payloads))


def read_plan(plan: bytes | Path) -> PlanText:
    """Read the text of a plan, or of its file."""
    data = plan.read_bytes() if isinstance(plan, Path) else bytes(plan)
    starts = [match.start() for match in re.finditer(rb"header \{\n", data)]
    graphs = []
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        graph = _graph(data[start:end].decode("latin-1"))
        if graph is not None:
            graphs.append(graph)
    return PlanText(tuple(graphs))


def _graph(text: str) -> Graph | None:
    """A graph's text, from its header on; None for those without an architecture."""
    head, _, rest = text.partition("\n}\n")
    architectures = tuple(re.findall(r"accelerators=\{([^}]*)\}", head)[:1])
    names = tuple(architectures[0].split()) if architectures else ()
    if not names or names == ("*",):
        return None
    described, _, body = rest.partition("\nmain {")
    if not body:
        described, _, body = rest.partition("main {")
    return Graph(
        names,
        _listed(head, "inputs"),
        _listed(head, "outputs"),
        tuple(
            Payload(name, int(size), tuple(int(part) for part in dims.split()), kind)
            for size, dims, name, kind in _PAYLOAD.findall(described)
        ),
        tuple(_kernels(body)),
        sum(int(size) for size in _REGION.findall(head)),
    )


def _listed(head: str, name: str) -> tuple[str, ...]:
    """Tensors of a list in the header, by the names that the network gave them."""
    found = re.search(rf"^\s+{name}=\{{(.*)$", head, re.MULTILINE)
    return tuple(_SUFFIX.sub("", item) for item in _NAME.findall(found[1])) if found else ()


def _kernels(body: str) -> list[Kernel]:
    kernels = []
    for line in body.split("\n"):
        if line.startswith("}"):
            break
        found = _KERNEL.match(line)
        if found is None or found[1] == "shape_call":
            continue
        inputs = re.search(r"(?:input_args|input)=\{([^}]*)\}", found[3])
        kernels.append(
            Kernel(found[1], found[2].strip('"'), tuple(_NAME.findall(inputs[1])) if inputs else ())
        )
    return kernels
