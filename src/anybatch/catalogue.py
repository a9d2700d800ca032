"""Catalogue: what the makers say of devices that need not be here.

The figures are those of data sheets and architecture papers: matrix rates without sparsity, and for
half precision with sums in float32, as torch computes (GeForce cards halve the rate for it). They are
ceilings, not promises; what is made of them stands in `estimate`. One row per device, with the
document that the row was taken from.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from anybatch.errors import InputError

_TERA, _GIGA, _GIB = 10**12, 10**9, 1 << 30

_KEPT_BY_DRIVER = 0.025
"""Of the memory on the sheet, torch reports 0.5% (data centre) to 2.3% (GeForce) less."""

_KEPT_BY_ECC = 1 / 16
"""What error correction takes where it has no memory of its own (GDDR6 of data-centre cards)."""


@dataclass(frozen=True, slots=True)
class Model:
    """One device as its maker describes it.

    Attributes:
        name: in the catalogue.
        maker_name: what a person calls it.
        memory_gib: as sold.
        inline_ecc: error correction takes its share of the memory.
        fp32, tf32, half: dense matrix rates in floating-point operations per second: float32 without
            tensor cores, TensorFloat-32 (0: it has none), float16 or bfloat16.
        bfloat16: whether bfloat16 is computed at the rate of float16.
        memory_bandwidth: bytes per second.
        link: what joins several of them.
        link_bandwidth: bytes per second in each direction, of one device to all others.
        capability: CUDA's compute capability, or ROCm's architecture.
        source: the document.
    """

    name: str
    maker_name: str
    memory_gib: int
    inline_ecc: bool
    fp32: float
    tf32: float
    half: float
    bfloat16: bool
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    capability: str
    source: str

    @property
    def usable_bytes(self) -> int:
        """Memory that a program can have: without what driver and error correction keep."""
        kept = (1 - _KEPT_BY_DRIVER) * (1 - _KEPT_BY_ECC if self.inline_ecc else 1)
        return int(self.memory_gib * _GIB * kept)


# Links, one direction. PCIe of sixteen lanes; NVLink as on the sheet, halved (sheets add both ways).
_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3 x16", 16), ("PCIe 4 x16", 32), ("PCIe 5 x16", 64)
_PCIE4_8 = ("PCIe 4 x8", 16)
_PCIE5_8 = ("PCIe 5 x8", 32)

_TURING = "NVIDIA Turing GPU Architecture (white paper)"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture (white paper)"
_ADA = "NVIDIA Ada GPU Architecture (white paper)"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture (white paper)"


def _sheet(device: str) -> str:
    return f"{device} data sheet"


def _row(
    name: str,
    maker_name: str,
    memory_gib: int,
    rates: tuple[float, float, float],
    bandwidth: float,
    link: tuple[str, float],
    capability: str,
    source: str,
    *,
    ecc: bool = False,
) -> Model:
    """A row in the units of the sheets: TFLOP/s (fp32, tf32, half), GB/s, GB/s."""
    fp32, tf32, half = (rate * _TERA for rate in rates)
    major = capability.partition(".")[0]
    return Model(
        name=name,
        maker_name=maker_name,
        memory_gib=memory_gib,
        inline_ecc=ecc,
        fp32=fp32,
        tf32=tf32,
        half=half,
        bfloat16=not major.isdigit() or int(major) >= 8,
        memory_bandwidth=bandwidth * _GIGA,
        link=link[0],
        link_bandwidth=link[1] * _GIGA,
        capability=capability,
        source=source,
    )


# fmt: off
_ROWS = (
    # Workstations and desks
    _row("rtx-2080ti", "GeForce RTX 2080 Ti", 11, (13.4, 0, 53.8), 616, _PCIE3, "7.5", _TURING),
    _row("rtx-3060-12gb", "GeForce RTX 3060", 12, (12.7, 12.7, 25.5), 360, _PCIE4, "8.6", _GA102),
    _row("rtx-3070", "GeForce RTX 3070", 8, (20.3, 20.3, 40.6), 448, _PCIE4, "8.6", _GA102),
    _row("rtx-3080-10gb", "GeForce RTX 3080", 10, (29.8, 29.8, 59.5), 760, _PCIE4, "8.6", _GA102),
    _row("rtx-3090", "GeForce RTX 3090", 24, (35.6, 35.6, 71), 936, _PCIE4, "8.6", _GA102),
    _row("rtx-4060-8gb", "GeForce RTX 4060", 8, (15.1, 15.1, 30.2), 272, _PCIE4_8, "8.9", _ADA),
    _row("rtx-4070", "GeForce RTX 4070", 12, (29.1, 29.1, 58.3), 504, _PCIE4, "8.9", _ADA),
    _row("rtx-4080", "GeForce RTX 4080", 16, (48.7, 48.7, 97.5), 717, _PCIE4, "8.9", _ADA),
    _row("rtx-4090", "GeForce RTX 4090", 24, (82.6, 82.6, 165.2), 1008, _PCIE4, "8.9", _ADA),
    _row("rtx-5070ti", "GeForce RTX 5070 Ti", 16, (43.9, 43.9, 87.9), 896, _PCIE5, "12.0",
         _RTX_BLACKWELL),
    _row("rtx-5080", "GeForce RTX 5080", 16, (56.3, 56.3, 112.6), 960, _PCIE5, "12.0",
         _RTX_BLACKWELL),
    _row("rtx-5090", "GeForce RTX 5090", 32, (104.8, 104.8, 209.5), 1792, _PCIE5, "12.0",
         _RTX_BLACKWELL),
    _row("rtx-a6000", "RTX A6000", 48, (38.7, 77.4, 154.8), 768, _PCIE4, "8.6", _GA102),
    _row("rtx-6000-ada", "RTX 6000 Ada", 48, (91.1, 182.1, 364.2), 960, _PCIE4, "8.9", _ADA),
    # Data centres
    _row("t4", "Tesla T4", 16, (8.1, 0, 65), 320, _PCIE3, "7.5", _sheet("NVIDIA T4"), ecc=True),
    _row("v100-16gb", "Tesla V100 SXM2", 16, (15.7, 0, 125), 900, ("NVLink 2", 150), "7.0",
         _sheet("NVIDIA V100")),
    _row("v100-32gb", "Tesla V100 SXM2", 32, (15.7, 0, 125), 900, ("NVLink 2", 150), "7.0",
         _sheet("NVIDIA V100")),
    _row("a10", "A10", 24, (31.2, 62.5, 125), 600, _PCIE4, "8.6", _sheet("NVIDIA A10"), ecc=True),
    _row("a30", "A30", 24, (10.3, 82, 165), 933, ("NVLink bridge", 100), "8.0",
         _sheet("NVIDIA A30")),
    _row("a40", "A40", 48, (37.4, 74.8, 149.7), 696, ("NVLink bridge", 56), "8.6",
         _sheet("NVIDIA A40"), ecc=True),
    _row("a100-40gb", "A100 SXM4", 40, (19.5, 156, 312), 1555, ("NVLink 3", 300), "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-40gb-pcie", "A100 PCIe", 40, (19.5, 156, 312), 1555, _PCIE4, "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-80gb", "A100 SXM4", 80, (19.5, 156, 312), 2039, ("NVLink 3", 300), "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-80gb-pcie", "A100 PCIe", 80, (19.5, 156, 312), 1935, _PCIE4, "8.0",
         _sheet("NVIDIA A100")),
    _row("l4", "L4", 24, (30.3, 60, 121), 300, _PCIE4, "8.9", _sheet("NVIDIA L4"), ecc=True),
    _row("l40s", "L40S", 48, (91.6, 183, 362), 864, _PCIE4, "8.9", _sheet("NVIDIA L40S"), ecc=True),
    _row("h100-80gb", "H100 SXM5", 80, (67, 494.7, 989.4), 3350, ("NVLink 4", 450), "9.0",
         _sheet("NVIDIA H100")),
    _row("h100-80gb-pcie", "H100 PCIe", 80, (51, 378, 756), 2000, _PCIE5, "9.0",
         _sheet("NVIDIA H100")),
    _row("h100-94gb-nvl", "H100 NVL", 94, (60, 417.5, 835.5), 3900, ("NVLink bridge", 300), "9.0",
         _sheet("NVIDIA H100")),
    _row("h200", "H200", 141, (67, 494.7, 989.4), 4800, ("NVLink 4", 450), "9.0",
         _sheet("NVIDIA H200")),
    _row("b200", "B200", 180, (75, 1125, 2250), 7700, ("NVLink 5", 900), "10.0",
         _sheet("NVIDIA HGX B200")),
    # ROCm calls its devices cuda, too. An MI250X is two devices to torch; this is one of them.
    _row("mi210", "Instinct MI210", 64, (45.3, 0, 181), 1638, ("Infinity Fabric", 150), "gfx90a",
         _sheet("AMD Instinct MI210")),
    _row("mi250x", "Instinct MI250X, one of its two dies", 64, (47.9, 0, 191.5), 1638,
         ("Infinity Fabric", 200), "gfx90a", _sheet("AMD Instinct MI250X")),
    _row("mi300x", "Instinct MI300X", 192, (163.4, 653.7, 1307.4), 5300, ("Infinity Fabric", 448),
         "gfx942", _sheet("AMD Instinct MI300X")),
)
# fmt: on

MODELS: dict[str, Model] = {row.name: row for row in _ROWS}
"""Every device, by name."""

# What else people write for one of them.
_ALIASES = {
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h100-pcie": "h100-80gb-pcie",
    "h100-nvl": "h100-94gb-nvl",
    "rtx-3060": "rtx-3060-12gb",
    "rtx-3080": "rtx-3080-10gb",
    "rtx-4060": "rtx-4060-8gb",
}
_NOISE = ("nvidia", "geforce", "quadro", "tesla", "amd", "instinct", "radeon", "sxm")


def find(name: str) -> Model:
    """The device called `name`, however it is written: `h100-80gb`, `H100 80GB`, `RTX 4090`, `4090`.

    Raises `InputError`, with the closest names, if there is none or more than one.
    """
    if exact := _exact(name):
        return exact
    key, known = _key(name), _KNOWN
    longer = [n for k, n in known.items() if key and k.startswith(key)]
    if len(set(longer)) == 1:
        return MODELS[longer[0]]
    if longer:
        raise InputError(
            f"device is {name!r}, of which there are several: write"
            f" {_either(list(dict.fromkeys(longer)))}."
        )
    close = [known[k] for k in difflib.get_close_matches(key, known, n=4, cutoff=0.5)]
    near = (
        f"write {_either(list(dict.fromkeys(close)))}, if you mean that, or" if close else "write"
    )
    raise InputError(
        f"device is {name!r}, which is not in the catalogue of GPUs: {near} its memory, such as"
        " '24GiB'."
    )


def knows(name: str) -> bool:
    """Whether `name` means one device of the catalogue."""
    return _exact(name) is not None


def recognise(reported: str, total_bytes: int) -> Model | None:
    """The device that a driver reports as `reported` (`"NVIDIA A100-SXM4-80GB"`), or None.

    Of several of one name, the one whose memory is closest to `total_bytes`.
    """
    words = set(_words(reported))
    best: tuple[int, float, Model] | None = None
    for model in _ROWS:
        wanted = [word for word in _words(model.name) if not word.endswith("gb")]
        if not set(wanted) <= words and "".join(wanted) not in "".join(_words(reported)):
            continue
        away = abs(model.usable_bytes / max(1, total_bytes) - 1)
        if away < 0.15 and (best is None or (-len(wanted), away) < best[:2]):
            best = (-len(wanted), away, model)
    return best[2] if best else None


def _words(name: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return [word for word in words if not any(word.startswith(noise) for noise in _NOISE)]


def _key(name: str) -> str:
    return re.sub(r"(\d+)(?:gib|gb|g)(?=[a-z]|$)", r"\1gb", "".join(_words(name)))


_KNOWN = {**{_key(n): n for n in MODELS}, **{_key(a): n for a, n in _ALIASES.items()}}


def _exact(name: str) -> Model | None:
    key = _key(name)
    for written in (key, f"{key}gb", f"rtx{key}"):
        if key and written in _KNOWN:
            return MODELS[_KNOWN[written]]
    return None


def _either(names: list[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
