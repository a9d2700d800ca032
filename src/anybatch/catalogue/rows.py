"""Rows: one per device, with the source of its figures.

Figures are from data sheets, product pages and architecture papers. Matrix rates are without sparsity;
those for half precision are with float32 accumulation, as torch computes. All figures are upper bounds;
`estimate` defines how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

_TERA, _GIGA, _GIB = 10**12, 10**9, 1 << 30

_KEPT_BY_DRIVER = 0.025
"""Fraction of the nominal memory that is not available: torch reports 0.5% (data center) to 2.3%
(GeForce) less."""

_KEPT_BY_ECC = 1 / 16
"""Fraction of the memory that error correction uses if it has no dedicated memory (GDDR6 of data center
cards)."""


@dataclass(frozen=True, slots=True)
class Model:
    """Vendor specification of one device.

    Attributes:
        name: name in the catalogue. Its words, separated by hyphens, distinguish it from all others.
        maker_name: product name.
        memory_gib: nominal memory.
        inline_ecc: whether error correction uses part of the memory.
        fp32, tf32, half: dense matrix rates in floating-point operations per second: float32 without
            tensor cores, TensorFloat-32 (0: not supported), float16, and bfloat16 if the device
            supports it.
        memory_bandwidth: bytes per second.
        link: type of the interconnect.
        link_bandwidth: bytes per second in each direction, from one device to all others.
        capability: CUDA compute capability, or ROCm architecture.
        source: source document.
    """

    name: str
    maker_name: str
    memory_gib: int
    inline_ecc: bool
    fp32: float
    tf32: float
    half: float
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    capability: str
    source: str

    @property
    def usable_bytes(self) -> int:
        """Memory available to a program, excluding what the driver and error correction use."""
        kept = (1 - _KEPT_BY_DRIVER) * (1 - _KEPT_BY_ECC if self.inline_ecc else 1)
        return int(self.memory_gib * _GIB * kept)


# Links, in one direction. PCIe has 16 lanes unless noted; NVLink is half the data sheet's value, which
# adds both directions.
_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3 x16", 16), ("PCIe 4 x16", 32), ("PCIe 5 x16", 64)
_PCIE4_8, _PCIE5_8 = ("PCIe 4 x8", 16), ("PCIe 5 x8", 32)
_NVLINK2, _NVLINK3 = ("NVLink 2", 150), ("NVLink 3", 300)
_NVLINK4, _NVLINK5 = ("NVLink 4", 450), ("NVLink 5", 900)
_FABRIC3, _FABRIC4 = ("Infinity Fabric", 448), ("Infinity Fabric", 537.6)

_TURING, _AMPERE, _ADA, _BLACKWELL = "7.5", "8.6", "8.9", "12.0"
_PAPERS = {
    _TURING: "NVIDIA Turing GPU Architecture (white paper)",
    _AMPERE: "NVIDIA Ampere GA102 GPU Architecture (white paper)",
    _ADA: "NVIDIA Ada GPU Architecture (white paper)",
    _BLACKWELL: "NVIDIA RTX Blackwell GPU Architecture (white paper)",
}


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
    """A row in the units of data sheets: rates in TFLOP/s (fp32, tf32, half), bandwidths in GB/s."""
    fp32, tf32, half = (rate * _TERA for rate in rates)
    return Model(
        name=name,
        maker_name=maker_name,
        memory_gib=memory_gib,
        inline_ecc=ecc,
        fp32=fp32,
        tf32=tf32,
        half=half,
        memory_bandwidth=bandwidth * _GIGA,
        link=link[0],
        link_bandwidth=link[1] * _GIGA,
        capability=capability,
        source=source,
    )


def _card(
    name: str,
    maker_name: str,
    memory_gib: int,
    cores: int,
    boost_mhz: int,
    bandwidth: float,
    link: tuple[str, float],
    capability: str,
    *,
    full: bool = False,
    ecc: bool = False,
) -> Model:
    """A row for a graphics card whose data sheet gives its cores and their clock: each core does one
    multiply-add per cycle. The ratio of the tensor core rates to this rate is from the architecture's
    white paper. With float32 accumulation, GeForce cards and some data center cards reach half the rate
    of the others (`full`)."""
    fp32 = 2 * cores * boost_mhz * 1e-6
    tf32, half = (0, 4) if capability == _TURING else (1, 2)
    rates = fp32, (1 + full) * tf32 * fp32, (1 + full) * half * fp32
    source = f"{maker_name} product page; {_PAPERS[capability]}"
    return _row(name, maker_name, memory_gib, rates, bandwidth, link, capability, source, ecc=ecc)


def _sheet(device: str) -> str:
    return f"{device} data sheet"


# Product guides of a server vendor.
_LENOVO_A800 = "Lenovo Press LP1813, ThinkSystem NVIDIA A800 PCIe GPU (product guide)"
_LENOVO_H800 = "Lenovo Press LP1814, ThinkSystem NVIDIA H800 PCIe Gen5 GPU (product guide)"


# fmt: off
_ROWS = (
    # Desktop: GiB, cores, boost clock in MHz, GB/s
    _card("rtx-2080", "GeForce RTX 2080", 8, 2944, 1710, 448, _PCIE3, _TURING),
    _card("rtx-2080-super", "GeForce RTX 2080 SUPER", 8, 3072, 1815, 496, _PCIE3, _TURING),
    _card("rtx-2080ti", "GeForce RTX 2080 Ti", 11, 4352, 1545, 616, _PCIE3, _TURING),
    _card("titan-rtx", "TITAN RTX", 24, 4608, 1770, 672, _PCIE3, _TURING, full=True),
    _card("rtx-3060-12gb", "GeForce RTX 3060", 12, 3584, 1777, 360, _PCIE4, _AMPERE),
    _card("rtx-3060ti", "GeForce RTX 3060 Ti", 8, 4864, 1665, 448, _PCIE4, _AMPERE),
    _card("rtx-3070", "GeForce RTX 3070", 8, 5888, 1725, 448, _PCIE4, _AMPERE),
    _card("rtx-3070ti", "GeForce RTX 3070 Ti", 8, 6144, 1770, 608, _PCIE4, _AMPERE),
    _card("rtx-3080-10gb", "GeForce RTX 3080", 10, 8704, 1710, 760, _PCIE4, _AMPERE),
    _card("rtx-3080-12gb", "GeForce RTX 3080", 12, 8960, 1710, 912, _PCIE4, _AMPERE),
    _card("rtx-3080ti", "GeForce RTX 3080 Ti", 12, 10240, 1665, 912, _PCIE4, _AMPERE),
    _card("rtx-3090", "GeForce RTX 3090", 24, 10496, 1695, 936, _PCIE4, _AMPERE),
    _card("rtx-3090ti", "GeForce RTX 3090 Ti", 24, 10752, 1860, 1008, _PCIE4, _AMPERE),
    _card("rtx-4060-8gb", "GeForce RTX 4060", 8, 3072, 2460, 272, _PCIE4_8, _ADA),
    _card("rtx-4060ti-8gb", "GeForce RTX 4060 Ti", 8, 4352, 2535, 288, _PCIE4_8, _ADA),
    _card("rtx-4060ti-16gb", "GeForce RTX 4060 Ti", 16, 4352, 2535, 288, _PCIE4_8, _ADA),
    _card("rtx-4070", "GeForce RTX 4070", 12, 5888, 2475, 504, _PCIE4, _ADA),
    _card("rtx-4070-super", "GeForce RTX 4070 SUPER", 12, 7168, 2475, 504, _PCIE4, _ADA),
    _card("rtx-4070ti", "GeForce RTX 4070 Ti", 12, 7680, 2610, 504, _PCIE4, _ADA),
    _card("rtx-4070ti-super", "GeForce RTX 4070 Ti SUPER", 16, 8448, 2610, 672, _PCIE4, _ADA),
    _card("rtx-4080", "GeForce RTX 4080", 16, 9728, 2505, 717, _PCIE4, _ADA),
    _card("rtx-4080-super", "GeForce RTX 4080 SUPER", 16, 10240, 2550, 736, _PCIE4, _ADA),
    _card("rtx-4090", "GeForce RTX 4090", 24, 16384, 2520, 1008, _PCIE4, _ADA),
    _card("rtx-4090-d", "GeForce RTX 4090 D", 24, 14592, 2520, 1008, _PCIE4, _ADA),
    _card("rtx-5060", "GeForce RTX 5060", 8, 3840, 2497, 448, _PCIE5_8, _BLACKWELL),
    _card("rtx-5060ti-8gb", "GeForce RTX 5060 Ti", 8, 4608, 2572, 448, _PCIE5_8, _BLACKWELL),
    _card("rtx-5060ti-16gb", "GeForce RTX 5060 Ti", 16, 4608, 2572, 448, _PCIE5_8, _BLACKWELL),
    _card("rtx-5070", "GeForce RTX 5070", 12, 6144, 2512, 672, _PCIE5, _BLACKWELL),
    _card("rtx-5070ti", "GeForce RTX 5070 Ti", 16, 8960, 2452, 896, _PCIE5, _BLACKWELL),
    _card("rtx-5080", "GeForce RTX 5080", 16, 10752, 2617, 960, _PCIE5, _BLACKWELL),
    _card("rtx-5090", "GeForce RTX 5090", 32, 21760, 2407, 1792, _PCIE5, _BLACKWELL),
    _row("rx-7900xtx", "Radeon RX 7900 XTX", 24, (61.4, 0, 122.8), 960, _PCIE4, "gfx1100",
         "AMD Radeon RX 7900 XTX product page"),
    # Workstation
    _card("quadro-rtx-6000", "Quadro RTX 6000", 24, 4608, 1770, 672, _PCIE3, _TURING, full=True),
    _card("quadro-rtx-8000", "Quadro RTX 8000", 48, 4608, 1770, 672, _PCIE3, _TURING, full=True),
    _card("rtx-a4000", "RTX A4000", 16, 6144, 1560, 448, _PCIE4, _AMPERE, full=True),
    _card("rtx-a4500", "RTX A4500", 20, 7168, 1650, 640, _PCIE4, _AMPERE, full=True),
    _card("rtx-a5000", "RTX A5000", 24, 8192, 1695, 768, _PCIE4, _AMPERE, full=True),
    _card("rtx-a5500", "RTX A5500", 24, 10240, 1665, 768, _PCIE4, _AMPERE, full=True),
    _card("rtx-a6000", "RTX A6000", 48, 10752, 1800, 768, _PCIE4, _AMPERE, full=True),
    _card("rtx-4500-ada", "RTX 4500 Ada", 24, 7680, 2580, 432, _PCIE4, _ADA, full=True),
    _card("rtx-5000-ada", "RTX 5000 Ada", 32, 12800, 2550, 576, _PCIE4, _ADA, full=True),
    _card("rtx-6000-ada", "RTX 6000 Ada", 48, 18176, 2505, 960, _PCIE4, _ADA, full=True),
    _card("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 96, 24064, 2617, 1792,
          _PCIE5, _BLACKWELL, full=True),
    _row("pro-w7900", "Radeon PRO W7900", 48, (61.3, 0, 122.6), 864, _PCIE4, "gfx1100",
         "AMD Radeon PRO W7900 product page"),
    # Data center: GiB, TFLOP/s in float32, TensorFloat-32 and half precision, GB/s
    _row("t4", "Tesla T4", 16, (8.1, 0, 65), 320, _PCIE3, "7.5", _sheet("NVIDIA T4"), ecc=True),
    _row("v100-16gb", "Tesla V100 SXM2", 16, (15.7, 0, 125), 900, _NVLINK2, "7.0",
         _sheet("NVIDIA V100")),
    _row("v100-16gb-pcie", "Tesla V100 PCIe", 16, (14, 0, 112), 900, _PCIE3, "7.0",
         _sheet("NVIDIA V100")),
    _row("v100-32gb", "Tesla V100 SXM2", 32, (15.7, 0, 125), 900, _NVLINK2, "7.0",
         _sheet("NVIDIA V100")),
    _row("v100-32gb-pcie", "Tesla V100 PCIe", 32, (14, 0, 112), 900, _PCIE3, "7.0",
         _sheet("NVIDIA V100")),
    _row("a10", "A10", 24, (31.2, 62.5, 125), 600, _PCIE4, "8.6", _sheet("NVIDIA A10"), ecc=True),
    _row("a10g", "A10G", 24, (35, 35, 70), 600, _PCIE4, "8.6", _sheet("NVIDIA A10G (AWS)"),
         ecc=True),
    _row("a30", "A30", 24, (10.3, 82, 165), 933, ("NVLink bridge", 100), "8.0",
         _sheet("NVIDIA A30")),
    _row("a40", "A40", 48, (37.4, 74.8, 149.7), 696, ("NVLink bridge", 56), "8.6",
         _sheet("NVIDIA A40"), ecc=True),
    _row("a100-40gb", "A100 SXM4", 40, (19.5, 156, 312), 1555, _NVLINK3, "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-40gb-pcie", "A100 PCIe", 40, (19.5, 156, 312), 1555, _PCIE4, "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-80gb", "A100 SXM4", 80, (19.5, 156, 312), 2039, _NVLINK3, "8.0",
         _sheet("NVIDIA A100")),
    _row("a100-80gb-pcie", "A100 PCIe", 80, (19.5, 156, 312), 1935, _PCIE4, "8.0",
         _sheet("NVIDIA A100")),
    _row("a800-80gb", "A800 SXM4", 80, (19.5, 156, 312), 2039, ("NVLink 3", 200), "8.0",
         _LENOVO_A800),
    _row("a800-80gb-pcie", "A800 PCIe", 80, (19.5, 156, 312), 1935, _PCIE4, "8.0", _LENOVO_A800),
    _row("l4", "L4", 24, (30.3, 60, 121), 300, _PCIE4, "8.9", _sheet("NVIDIA L4"), ecc=True),
    _row("l20", "L20", 48, (59.8, 59.8, 119.5), 864, _PCIE4, "8.9", _sheet("NVIDIA L20"), ecc=True),
    _card("l40", "L40", 48, 18176, 2490, 864, _PCIE4, _ADA, ecc=True),
    _row("l40s", "L40S", 48, (91.6, 183, 362), 864, _PCIE4, "8.9", _sheet("NVIDIA L40S"), ecc=True),
    _row("h20-96gb", "H20", 96, (44, 74, 148), 4000, _NVLINK4, "9.0", _sheet("NVIDIA H20")),
    _row("h100-80gb", "H100 SXM5", 80, (67, 494.7, 989.4), 3350, _NVLINK4, "9.0",
         _sheet("NVIDIA H100")),
    _row("h100-80gb-pcie", "H100 PCIe", 80, (51, 378, 756), 2000, _PCIE5, "9.0",
         _sheet("NVIDIA H100")),
    _row("h100-94gb-nvl", "H100 NVL", 94, (60, 417.5, 835.5), 3900, ("NVLink bridge", 300), "9.0",
         _sheet("NVIDIA H100")),
    _row("h800-80gb", "H800 SXM5", 80, (67, 494.7, 989.4), 3350, ("NVLink 4", 200), "9.0",
         _sheet("NVIDIA H800")),
    _row("h800-80gb-pcie", "H800 PCIe", 80, (51, 378, 756), 2000, _PCIE5, "9.0", _LENOVO_H800),
    _row("h200", "H200", 141, (67, 494.7, 989.4), 4800, _NVLINK4, "9.0", _sheet("NVIDIA H200")),
    _row("h200-nvl", "H200 NVL", 141, (60, 417.5, 835.5), 4800, ("NVLink bridge", 450), "9.0",
         _sheet("NVIDIA H200")),
    _row("gh200-96gb", "GH200", 96, (67, 494.7, 989.4), 4000, _NVLINK4, "9.0",
         _sheet("NVIDIA GH200")),
    _row("gh200-144gb", "GH200", 144, (67, 494.7, 989.4), 4900, _NVLINK4, "9.0",
         _sheet("NVIDIA GH200")),
    # B200 and GB200: from data sheets of whole systems, divided by the number of devices; earlier
    # data sheets of the B200 give 80 TFLOP/s, 192 GB and 8 TB/s. The Blackwell Ultra data sheet gives
    # per-device figures for its two products: of 288 GB of memory, 270 and 279 are usable.
    _row("b200", "B200", 180, (75, 1125, 2250), 7700, _NVLINK5, "10.0", _sheet("NVIDIA HGX B200")),
    _row("gb200", "GB200", 186, (80, 1250, 2500), 8000, _NVLINK5, "10.0",
         _sheet("NVIDIA GB200 NVL72")),
    _row("b300", "B300", 270, (75, 1125, 2250), 7700, _NVLINK5, "10.3",
         _sheet("NVIDIA Blackwell Ultra")),
    _row("gb300", "GB300", 279, (80, 1250, 2500), 8000, _NVLINK5, "10.3",
         _sheet("NVIDIA Blackwell Ultra")),
    # ROCm devices are also of type cuda. torch sees an MI250X as two devices; this is one of them.
    _row("mi210", "Instinct MI210", 64, (45.3, 0, 181), 1638, ("Infinity Fabric", 150), "gfx90a",
         _sheet("AMD Instinct MI210")),
    _row("mi250x", "Instinct MI250X, one of its two dies", 64, (47.9, 0, 191.5), 1638,
         ("Infinity Fabric", 200), "gfx90a", _sheet("AMD Instinct MI250X")),
    _row("mi300x", "Instinct MI300X", 192, (163.4, 653.7, 1307.4), 5300, _FABRIC3, "gfx942",
         _sheet("AMD Instinct MI300X")),
    _row("mi325x", "Instinct MI325X", 256, (163.4, 653.7, 1307.4), 6000, _FABRIC3, "gfx942",
         _sheet("AMD Instinct MI325X")),
    _row("mi350x", "Instinct MI350X", 288, (144.2, 0, 2306.9), 8000, _FABRIC4, "gfx950",
         _sheet("AMD Instinct MI350X")),
    _row("mi355x", "Instinct MI355X", 288, (157.3, 0, 2516.6), 8000, _FABRIC4, "gfx950",
         _sheet("AMD Instinct MI355X")),
)
# fmt: on

MODELS: dict[str, Model] = {row.name: row for row in _ROWS}
"""Every device, by name."""
