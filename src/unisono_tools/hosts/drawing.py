"""The text of a host report, for 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from click import style

from unisono.devices import Link, LinkKind, Topology
from unisono_tools.hosts.report import Chosen, HostReport
from unisono_tools.tables import LINK_NAMES, spell_rate, spell_seconds

_WIDTH = 80
_GIBIBYTE = 1 << 30
_GPU_TENSORS = (
    "Between workers GPU tensors go through pinned host memory, or through NCCL if "
    "CommunicationOptions ask for it."
)
_NO_ENGINES = "No engines are recorded: the report assumes the native core and NCCL."
_COLORS = {
    LinkKind.NVSWITCH: "green",
    LinkKind.NVLINK: "green",
    LinkKind.NODE: "yellow",
    LinkKind.SYS: "red",
}
_WORDS = {
    LinkKind.NVSWITCH: "that many NVLinks, through NVSwitch",
    LinkKind.NVLINK: "that many NVLinks",
    LinkKind.PIX: "one PCIe bridge",
    LinkKind.PXB: "several PCIe bridges",
    LinkKind.PHB: "the PCIe host bridge of a CPU",
    LinkKind.NODE: "several host bridges of one NUMA node",
    LinkKind.SYS: "the connection between NUMA nodes",
    LinkKind.UNKNOWN: "not known",
}


def draw(report: HostReport) -> str:
    """Returns the report as lines of text, with the colors of a terminal."""
    sections = [
        ("Versions", _versions(report)),
        ("Engines", _engines(report)),
        ("Devices", _devices(report)),
        (f"Links ({report.topology.source})", _links(report.topology)),
        ("Groups of the hierarchical copy", _groups(report)),
        ("Tuning", _tuning(report)),
        ("What Unisono chooses", _chosen(report)),
    ]
    texts = []
    for title, lines in sections:
        if body := [line and f"  {line}" for line in lines]:
            heading = [style(line, bold=True) for line in textwrap.wrap(title, _WIDTH)]
            texts.append("\n".join([*heading, *body]))
    return "\n\n".join(texts)


def _versions(report: HostReport) -> Iterator[str]:
    for name, version in report.versions.items():
        yield f"{name:12} {version or 'none'}"


def _engines(report: HostReport) -> Iterator[str]:
    for name, engine in report.engines.items():
        found = style("yes", fg="green") if engine.is_found else style("no ", fg="yellow")
        first, *others = textwrap.wrap(engine.detail, _WIDTH - 19) or [""]
        yield f"{name:12} {found} {first}"
        yield from (" " * 17 + line for line in others)


def _devices(report: HostReport) -> Iterator[str]:
    for index, gpu in enumerate(report.topology.gpus):
        node = "" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
        size = f"{gpu.num_bytes / _GIBIBYTE:.0f} GiB"
        line = f"cuda:{index:<3} {gpu.name:32.32} {size:>8}  {gpu.pci_bus_id or '':12}  {node}"
        yield line.rstrip()
    cores = "" if report.num_cores is None else f" on {report.num_cores} cores"
    yield f"cpu:0, cpu:1, ...  any number of replicas{cores}"


def _links(topology: Topology) -> Iterator[str]:
    """Draws the matrix of links, and explains its abbreviations."""
    if len(topology.gpus) < 2:
        return
    links = [link for gpu in topology.gpus for link in gpu.links]
    width = max(len(str(link)) for link in links) + 1
    yield " " * 8 + "".join(f"{index:<{width}}" for index in range(len(topology.gpus))).rstrip()
    for index, gpu in enumerate(topology.gpus):
        cells = [_cell(link, width) for link in gpu.links]
        yield f"cuda:{index:<3}" + "".join(cells).rstrip()
    yield ""
    yield from _legend(links)


def _cell(link: Link, width: int) -> str:
    return style(str(link), fg=_COLORS.get(link.kind)) + " " * (width - len(str(link)))


def _legend(links: Sequence[Link]) -> Iterator[str]:
    found = {link.kind for link in links}
    for kind, words in _WORDS.items():
        if kind in found:
            number = "#" if kind in (LinkKind.NVLINK, LinkKind.NVSWITCH) else ""
            yield f"{kind.value + number:8}{words}"
    if not all(link.is_peer for link in links):
        yield f"{'*':8}no peer access: CUDA copies through the memory of the host"


def _groups(report: HostReport) -> Iterator[str]:
    if len(report.devices) < 2:
        return
    for number, group in enumerate(report.groups):
        branch = "└─" if number == len(report.groups) - 1 else "├─"
        yield f"{branch} " + "  ".join(str(report.devices[i]) for i in group)


def _tuning(report: HostReport) -> Iterator[str]:
    tuning, detail = report.tuned
    yield from textwrap.wrap(detail, _WIDTH - 2, break_on_hyphens=False)
    for name, words in LINK_NAMES.items():
        link = None if tuning is None else getattr(tuning, name)
        if link is not None:
            yield f"{words:36}{spell_seconds(link.latency):>8}  {spell_rate(link.bandwidth):>10}"


def _chosen(report: HostReport) -> Iterator[str]:
    yield from _choice("all devices of this host", report.processes)
    for devices, chosen in report.reductions.items():
        yield from _choice(f"1 worker, {devices}", chosen)
    for job, chosen in report.communicators.items():
        yield from _choice(job, chosen)
    if report.topology.gpus:
        yield from textwrap.wrap(_GPU_TENSORS, _WIDTH - 2)
    if not report.engines:
        yield from textwrap.wrap(_NO_ENGINES, _WIDTH - 2)


def _choice(where: str, chosen: Chosen) -> Iterator[str]:
    yield f"{where:30} {style(chosen.what, fg='cyan')}"
    indent = " " * 4
    yield from textwrap.wrap(
        chosen.reason, _WIDTH - 2, initial_indent=indent, subsequent_indent=indent
    )
