"""Paper 001 (serving with KV offloading) as printed: its tables, its case studies, its slips.

Nothing here routes a request: Eq. 1 to 5 are ``kappa.model`` and ``kappa.cost``, and ``law_rows``
puts these beside. This file is the record that the cost model we build on is the one that was
published: every figure is recomputed from its inputs beside the printed value, and where the print
is wrong, ``SLIPS`` says how. Equations take SI units (bytes, bytes/s, FLOP/s, seconds); the tables
keep the paper's own. The paper's text has lost its symbols: the forms below were rebuilt from its
prose and check out in dimension and value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kappa.cost import IdleCost, TokenCounts, idle_cost
from kappa.hardware import CATALOGUE, REACHED
from kappa.shapes import model_shape

# --- Equations -----------------------------------------------------------------------------------


def kappa_crit(flops_per_byte: float, bytes_per_flop: float) -> float:
    """Eq. 6: κ_crit = (F/M)·(B/G), the model factor (FLOP/byte) times the hardware factor."""
    return flops_per_byte * bytes_per_flop


def pcie_overhead(kappa: float, critical: float) -> float:
    """Eq. 8: O = κ/(κ + κ_crit), the share of TTFT spent on the link; 1 - U. Needs κ_crit > 0."""
    return kappa / (kappa + critical)


def max_concurrent_requests(
    vram_bytes: float, cached_tokens: float, new_tokens: float, kv_token_bytes: float
) -> float:
    """Eq. 9: N = V/((C + T)·M), the number of requests that fit VRAM at once, fractional.

    Raises:
        ValueError: a request without tokens.
    """
    footprint = (cached_tokens + new_tokens) * kv_token_bytes
    if footprint <= 0:
        raise ValueError("cached_tokens + new_tokens is 0: a request holds at least one token")
    return vram_bytes / footprint


def scheduled_tokens(
    vram_bytes: float, kv_token_bytes: float, kappa: float, budget_tokens: float
) -> float:
    """Eq. 10: S = V/(M·(1 + κ)), new tokens per iteration that VRAM allows, at most the budget."""
    return min(budget_tokens, vram_bytes / (kv_token_bytes * (1.0 + kappa)))


# --- Tables --------------------------------------------------------------------------------------

KB = 1e3
"""The paper's KV sizes are decimal kilobytes."""

C2C_ONE_WAY_GB_PER_S = 450.0
"""The data sheet's NVLink-C2C one way; the paper's 900 are both directions together."""
LINK_GB_PER_S = {"PCIe-4": 32.0, "PCIe-5": 64.0, "NVLink-C2C": 900.0, "unified HBM": 8000.0}
SPARSE_FP16_TFLOPS = {"A100": 624.0, "H100": 1979.0, "B200": 5000.0}
"""Peaks behind Table 2: data-sheet FP16 with 2:4 sparsity, twice the dense rate."""
TEXT_H100_TFLOPS = 2000.0
MEASURED_LINK_GB_PER_S = 15.0

TABLE1_TURNS = ((0, 3), (4, 2), (8, 3))
"""(cached, computed) tokens of each turn of the example conversation."""

TABLE2 = {"B200": (6.7, 13.5), "H100": (17.0, 34.0), "A100": (53.8, 107.5)}
"""B/G in KB/GFLOP behind PCIe-4 and PCIe-5."""

TABLE3_NODES = (("B200", 1), ("H100", 1), ("A100", 0))
"""Columns of Table 3: GPU, and its column in Table 2 (B200 and H100 on PCIe-5, A100 on PCIe-4)."""

TABLE5_POWER_W = {70: ((196, 342), (152, 202)), 130: ((192, 287), (152, 194))}
"""Requests/s: (mean, max) watts for ShareGPT, NarrativeQA, on GPUs rated at ``H100_TDP_W``."""

H100_TDP_W = 700.0
B200_KV_BYTES = 60e9
"""VRAM left for KV in the B200 case. The print lost it; 60 GB gives its 1.8 requests."""


@dataclass(frozen=True, slots=True)
class Table3Row:
    """A model of Table 3: its Eq. 1 or 2 inputs, then the printed M (KB), F/M and κ_crit."""

    model: str
    params_active: float
    layers: int
    kv_width: int
    printed_kv_kb: float
    printed_gflop_per_kb: float
    printed_kappa: tuple[float, float, float]

    @property
    def kv_bytes(self) -> float:
        """M in bytes: ``kv_width`` elements of two bytes per layer."""
        return self.layers * self.kv_width * 2.0

    @property
    def gflop_per_kb(self) -> float:
        """F/M with F = 2P, unrounded."""
        return 2.0 * self.params_active / self.kv_bytes / 1e6


TABLE3 = (
    Table3Row("Llama-3.1-70B", 70e9, 80, 2 * 8 * 128, 328, 0.42, (5.7, 14.3, 22.6)),
    Table3Row("Llama-3.1-405B", 405e9, 126, 2 * 8 * 128, 516, 1.42, (19.2, 48.3, 76.4)),
    Table3Row("Qwen3-30B-A3B", 3.3e9, 48, 2 * 4 * 128, 98, 0.07, (1.0, 2.4, 3.8)),
    Table3Row("Qwen3-235B-A22B", 22e9, 94, 2 * 4 * 128, 192, 0.23, (3.1, 7.8, 12.4)),
    Table3Row("DeepSeek-V3", 37e9, 61, 512 + 64, 70, 1.06, (14.3, 36.0, 57.0)),
)


def hardware_factor_kb_per_gflop(
    link_gb_per_s: float, tflops: float, kb_per_gb: float = 1024.0**2
) -> float:
    """B/G in KB/GFLOP. Table 2 counts 1024² KB in a GB; §7 counts 10⁶ (pass ``kb_per_gb=1e6``)."""
    return link_gb_per_s * kb_per_gb / (tflops * 1e3)


def table2_rows() -> list[dict[str, str | float]]:
    """Table 2, printed beside recomputed B/G in KB/GFLOP: gpu, pcie, paper, ours."""
    rows: list[dict[str, str | float]] = []
    for gpu, printed in TABLE2.items():
        for pcie, value in zip((4, 5), printed, strict=True):
            link = LINK_GB_PER_S[f"PCIe-{pcie}"]
            ours = hardware_factor_kb_per_gflop(link, SPARSE_FP16_TFLOPS[gpu])
            rows.append({"gpu": gpu, "pcie": pcie, "paper": value, "ours": ours})
    return rows


def table3_rows() -> list[dict[str, str | float]]:
    """Table 3's κ_crit: model, gpu, paper, paper_formula, corrected, dense_decimal.

    ``paper_formula`` is printed F/M times printed B/G; ``corrected`` takes the exact F/M instead;
    ``dense_decimal`` that, the dense half of the peak, and 10⁶ KB in a GB.
    """
    rows: list[dict[str, str | float]] = []
    for row in TABLE3:
        for (gpu, column), printed in zip(TABLE3_NODES, row.printed_kappa, strict=True):
            factor, link = TABLE2[gpu][column], LINK_GB_PER_S[f"PCIe-{column + 4}"]
            dense = hardware_factor_kb_per_gflop(link, SPARSE_FP16_TFLOPS[gpu] / 2, 1e6)
            rows.append({
                "model": row.model, "gpu": gpu, "paper": printed,
                "paper_formula": kappa_crit(row.printed_gflop_per_kb, factor),
                "corrected": kappa_crit(row.gflop_per_kb, factor),
                "dense_decimal": kappa_crit(row.gflop_per_kb, dense),
            })  # fmt: skip
    return rows


# --- Case studies and text figures ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A figure from the text."""

    name: str
    paper: float | None  # as printed; None where the print lost it
    recomputed: float  # from the paper's own inputs
    # One printed figure over another, which shows no more than that the paper can divide; all
    # others evaluate an equation, and can miss.
    quotient: bool = False
    one_way: float | None = None  # with `C2C_ONE_WAY_GB_PER_S`, where NVLink-C2C is part of it


def cases() -> list[Case]:
    """Every case study and derived figure of the paper that its own inputs determine."""
    return [*_case_405b(), *_case_b200(), *_measured_bandwidth(), *_comparisons(), *_implications()]


def _case_405b() -> list[Case]:
    """§2.3 and §3.1: Llama-3.1-405B on an H100, a 65K-token document and a 32-token question."""
    row = TABLE3[1]
    cached, new = 65_000, 32
    document_bytes = cached * row.printed_kv_kb * KB
    transfer_s = document_bytes / (LINK_GB_PER_S["PCIe-5"] * 1e9)
    flops = new * 2.0 * row.params_active
    compute_s = flops / (TEXT_H100_TFLOPS * 1e12)
    model_factor = 2.0 * row.params_active / (row.printed_kv_kb * KB)
    critical = kappa_crit(model_factor, 64e9 / (TEXT_H100_TFLOPS * 1e12))
    measured = kappa_crit(model_factor, 15e9 / (TEXT_H100_TFLOPS * 1e12))
    return [
        Case("405b document KV, GB", 33, document_bytes / 1e9),
        Case("405b document transfer, ms", 500, transfer_s * 1e3),
        Case("405b question compute, TFLOP", 26, flops / 1e12),
        Case("405b question compute, ms", 12.8, compute_s * 1e3),
        Case("405b transfer over compute", 39, transfer_s / compute_s),
        Case("405b on H100 PCIe-5, kappa_crit", 50, critical),
        Case("405b document kappa over kappa_crit", 40, cached / new / critical),
        Case("405b at 15 GB/s, kappa_crit", None, measured),
    ]


def _case_b200() -> list[Case]:
    """§3.2: a B200 with a 4000-token budget; V, C and T are inferred, the print lost them."""
    token_bytes, budget = TABLE3[1].printed_kv_kb * KB, 4000
    requests = max_concurrent_requests(B200_KV_BYTES, 65_000, 32, token_bytes)
    document = scheduled_tokens(B200_KV_BYTES, token_bytes, 65_000 / 32, budget)
    moderate = scheduled_tokens(B200_KV_BYTES, token_bytes, 8192 / 128, budget)
    return [
        Case("b200 concurrent requests", 1.8, requests),
        Case("b200 scheduled tokens", None, document),
        Case("b200 moderate share of budget", 0.45, moderate / budget),
    ]


_LINK_SHARES = (
    "qwen3-235b link share, 65K cached and 64 new",
    "qwen3-235b link share, 8K cached and 128 new",
)


def _measured_bandwidth() -> list[Case]:
    """§6: κ_crit at the measured 15 GB/s, and overheads measured on Qwen3-235B-A22B."""
    share = MEASURED_LINK_GB_PER_S / LINK_GB_PER_S["PCIe-5"]
    h100 = TABLE2["H100"][1]
    llama, qwen = (TABLE3[i].printed_gflop_per_kb * h100 for i in (0, 3))
    power = TABLE5_POWER_W[70]
    return [
        Case("measured share of PCIe-5 peak", 0.23, share, quotient=True),
        Case("llama-70b at 15 GB/s, kappa_crit", 3.3, llama * share),
        Case("qwen3-235b at 15 GB/s, kappa_crit", 1.8, qwen * share),
        Case(_LINK_SHARES[0], 0.99, pcie_overhead(1024, qwen)),
        Case(_LINK_SHARES[1], 0.88, pcie_overhead(64, qwen)),
        Case("sharegpt power over TDP", 0.28, power[0][0] / H100_TDP_W, quotient=True),
        Case("narrativeqa power over TDP", 0.22, power[1][0] / H100_TDP_W, quotient=True),
        Case("sharegpt over narrativeqa power", 1.29, power[0][0] / power[1][0], quotient=True),
    ]


def _comparisons() -> list[Case]:
    """§2 and §5: ratios the text draws from Tables 1 to 3."""
    cached = sum(turn[0] for turn in TABLE1_TURNS)
    computed = sum(turn[1] for turn in TABLE1_TURNS)
    llama405, qwen, deepseek = TABLE3[1], TABLE3[3], TABLE3[4]
    return [
        Case("table 1 computation saved", 0.60, cached / (cached + computed), quotient=True),
        Case("50 GB from HBM, ms", 15, 50 / 3.35, quotient=True),
        Case("50 GB over PCIe-5, ms", 800, 50 / 64 * 1e3, quotient=True),
        Case("b200 over h100 compute", 2.5, 5000 / 1979, quotient=True),
        Case(
            "b200 over h100 kappa_crit", 0.40, TABLE2["B200"][1] / TABLE2["H100"][1], quotient=True
        ),
        Case("deepseek over qwen3-235b F/M", 4.6, 1.06 / 0.23, quotient=True),
        Case("deepseek over qwen3-235b KV", 0.36, deepseek.kv_bytes / qwen.kv_bytes),
        Case("deepseek over 405b KV", 0.14, deepseek.kv_bytes / llama405.kv_bytes),
        Case("qwen3-235b over 405b KV", 0.37, qwen.kv_bytes / llama405.kv_bytes),
    ]


def _implications() -> list[Case]:
    """§7: NVLink-C2C and unified HBM on a B200 (decimal units here), MLA and quantised KV."""
    qwen, deepseek = TABLE3[3].printed_gflop_per_kb, TABLE3[4].printed_gflop_per_kb
    peak = SPARSE_FP16_TFLOPS["B200"]
    both = LINK_GB_PER_S["NVLink-C2C"]
    c2c, half, unified = (
        hardware_factor_kb_per_gflop(link, peak, 1e6)
        for link in (both, C2C_ONE_WAY_GB_PER_S, LINK_GB_PER_S["unified HBM"])
    )
    h100 = TABLE2["H100"][1]
    mla = TABLE3[3].printed_kv_kb / TABLE3[4].printed_kv_kb
    llama_mla = TABLE3[0].printed_kv_kb / TABLE3[4].printed_kv_kb
    return [
        Case("c2c over PCIe-5 bandwidth", 14, both / 64, True, C2C_ONE_WAY_GB_PER_S / 64),
        Case("c2c B/G, KB/GFLOP", 180, c2c, one_way=half),
        Case("c2c qwen3-235b kappa_crit", 41.5, qwen * c2c, one_way=qwen * half),
        Case("c2c deepseek kappa_crit", 191, deepseek * c2c, one_way=deepseek * half),
        Case("c2c over h100 PCIe-5", 5.3, c2c / h100, one_way=half / h100),
        Case("unified qwen3-235b kappa_crit", 370, qwen * unified),
        Case("unified deepseek kappa_crit", 1700, deepseek * unified),
        Case("unified over c2c", 9, unified / c2c, True, unified / half),
        Case("unified over h100 PCIe-5", 48, unified / h100),
        Case("mla over qwen3-235b KV", 2.7, mla, quotient=True),
        Case("mla over llama-70b KV", 4.7, llama_mla, quotient=True),
        Case("mla and FP4 over qwen3-235b KV", 11, mla * 4, quotient=True),
    ]


# --- Our law beside the print --------------------------------------------------------------------


def law_rows() -> list[dict[str, str | float | None]]:
    """Printed figures that count a question's FLOPs alone, beside `kappa.cost`, where a step also
    reads its weights and attends to what is cached: name, paper, equation, law.

    At data-sheet rates, which flatter both sides: the case study's one H100 behind 64 GB/s (which
    could not hold the 405B's weights), and the measured server, eight behind 15 GB/s each.
    """
    bare: dict[str, Any] = dict.fromkeys((*REACHED, "exposed", "load_fixed_s", "copy_fixed_s"), 0.0)
    node = replace(CATALOGUE["h100-pcie5"], h2d_bytes_per_s=64e9, **bare)
    server = replace(node, h2d_bytes_per_s=MEASURED_LINK_GB_PER_S * 1e9).times(8)
    case_study = "llama-3.1-405b", node, 65_000, 32
    printed = {case.name: case for case in cases()}

    def share(cost: IdleCost) -> float:
        return cost.load_s / (cost.load_s + cost.compute_s)

    rows: list[dict[str, str | float | None]] = []
    for name, (model, where, cached, new), figure in (
        ("405b question compute, ms", case_study, lambda cost: cost.compute_s * 1e3),
        ("405b transfer over compute", case_study, lambda cost: cost.load_s / cost.compute_s),
        (_LINK_SHARES[0], ("qwen3-235b-a22b", server, 65_536, 64), share),
        (_LINK_SHARES[1], ("qwen3-235b-a22b", server, 8192, 128), share),
    ):
        law = figure(idle_cost(TokenCounts(0, cached, new), model_shape(model), where))
        case = printed[name]
        rows.append({"name": name, "paper": case.paper, "equation": case.recomputed, "law": law})
    return rows


# --- Slips ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slip:
    """A place where the paper is wrong or inconsistent: what it prints, what holds, and why."""

    name: str
    where: str
    printed: str
    holds: str
    why: str


SLIPS = (
    Slip("sparse-fp16-peak", "Table 2", "G = 624/1979/5000 TFLOP/s", "312/989/2500 dense",
         "dense models cannot use 2:4 sparsity, so every κ_crit doubles"),
    Slip("mixed-units", "Tables 2 and 3, §7.1", "GB = 1024² KB beside KB = 1000 B, then decimal",
         "decimal throughout: 51.3/102.6, 16.2/32.3, 6.4/12.8", "Table 2 reads 4.9% high"),
    Slip("b200-pcie5", "Table 2", "13.5", "13.4", "64·1024²/5e6 = 13.42"),
    Slip("llama-405b-factor", "Table 3", "F/M = 1.42", "1.57",
         "1.42 implies 366 B parameters; its case study has 810/516; κ_crit is 21.2/53.4/84.4"),
    Slip("qwen-kv-truncated", "Table 3", "192 KB", "192.5 KB", "94·4·128·2·2 = 192,512 bytes"),
    Slip("tera-for-peta", "§3.1", "H100 at 2 TFLOP/s", "2 PFLOP/s", "prefix slip"),
    Slip("case-405b-rounding", "§2.3", "12.8 ms, 39x", "12.96 ms, 40.4x",
         "39 is 500/12.8, both rounded first"),
    Slip("weights-read-per-step", "§2.3, §3.1", "12.8 ms, 39x", "258 ms, 2.0x",
         "a step reads all weights, 242 ms here, and attends to what is cached, not only computes "
         "the FLOPs of new tokens: our law at the same data-sheet rates"),
    Slip("c2c-both-ways", "§7.1", "900 GB/s one way", "450 GB/s one way",
         "the vendor's 900 GB/s is the total of both directions, so C2C figures halve"),
    Slip("c2c-gain-units", "§7.1", "5.3x", "5.57x", "decimal 180 over Table 2's binary 34"),
    Slip("unified-gain", "Abstract, §7.1", "48x, 9x", "47.1x, 8.9x", "rounded up"),
    Slip("attention-negligible", "§9", "about 10% at long context", "+67% to +781% at 65K",
         "4·L·n_q·d·S against 2P reaches 10% between 0.8K and 9.8K tokens"),
    Slip("single-h100-405b", "§3.1, Table 3", "405B on one GPU", "810 GB of weights",
         "tensor parallelism scales B and G alike only while KV heads can be split"),
    Slip("measured-overheads", "§6.2 and §6.3", "κ_crit 1 to 2 measured", "8.7 to 10.3",
         "link shares of 88% at κ = 64 and 99% at κ = 1024 imply the latter"),
    Slip("workload-medians", "§2.2 and §4", "over 10K and 65K cached", "3.2K and 57K",
         "the two sections disagree; FinQA's 167K over 23 gives 7.3K, not 10K"),
)  # fmt: skip
