import tomllib
from pathlib import Path

import pytest
from raised import raises_code

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, gpu_names, load_gpu, with_figures
from onerank.ir.errors import TargetError

DATA = Path(__file__).parent / "data"
BAD = sorted((DATA / "bad_gpus").glob("*.toml"))
SHIPPED = sorted((Path(__file__).parents[3] / "annotate" / "gpus").glob("*.toml"))


def test_the_shipped_gpus():
    assert gpu_names() == [
        "A10",
        "A100-PCIe-80GB",
        "A100-SXM-40GB",
        "A100-SXM-80GB",
        "A30",
        "A40",
        "Ascend-910B",
        "Ascend-910C",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "GH200",
        "Gaudi-3",
        "H100-NVL",
        "H100-PCIe",
        "H100-SXM",
        "H20",
        "H200",
        "H200-NVL",
        "H800",
        "L4",
        "L40",
        "L40S",
        "MI250X",
        "MI300X",
        "MI325X",
        "MI355X",
        "RTX-3090",
        "RTX-4090",
        "RTX-5090",
        "RTX-6000-Ada",
        "RTX-A6000",
        "RTX-PRO-6000",
        "Rubin",
        "T4",
        "TPU-v5p",
        "TPU-v6e",
        "Trainium2",
        "V100",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_description_loads_and_uses_all_its_sources(path: Path):
    gpu = load_gpu(path)
    assert gpu.name == path.stem
    assert gpu == load_gpu(gpu.name)
    assert {figure.source for figure in gpu.figures.values()} == set(gpu.sources)
    assert all(gpu.sources.values())
    assert gpu.tensor_flops_per_s("bfloat16") or gpu.tensor_flops_per_s("float16")
    if gpu.vendor in ("NVIDIA", "AMD"):  # others do not publish these
        assert gpu.tensor_flops_per_s("float16")
        assert gpu.vector_flops_per_s
        assert gpu.tdp_w
    assert gpu.idle_w is None or gpu.idle_w < (gpu.tdp_w or 0)


@pytest.mark.parametrize(
    ("name", "capability"),
    [("V100", 70), ("A100", 80), ("A30", 80), ("A10", 86), ("RTX-3090", 86), ("L40S", 89),
     ("H20", 90), ("GB200", 100), ("B300", 103), ("RTX-5090", 120), ("MI300X", None)],
)  # fmt: skip
def test_the_compute_capability_is_the_dies_not_the_architectures(
    name: str, capability: int | None
):
    assert load_gpu(name).capability == capability


def test_every_shipped_gpu_of_nvidia_has_a_compute_capability_but_rubin():
    without = [gpu.name for gpu in map(load_gpu, SHIPPED) if gpu.is_nvidia and not gpu.capability]
    assert without == ["Rubin"]  # none published


def test_no_alias_names_two_gpus():
    seen: dict[str, str] = {}
    for path in SHIPPED:
        data = tomllib.loads(path.read_text())
        for name in (data["name"], *data["aliases"]):
            key = name.replace("-", "").replace(" ", "").lower()
            assert key not in seen, f"{name}: {path.stem} and {seen[key]}"
            seen[key] = path.stem


# SMs, boost MHz, memory GB, GB/s; dense TFLOPS in bf16, fp16, tf32, fp8, None where it has none
PEAKS: dict[str, tuple[tuple[int, int, float, float], tuple[float | None, ...]]] = {
    "A100-SXM-80GB": ((108, 1410, 84.99, 2039), (312, 312, 156, None)),
    "A100-PCIe-80GB": ((108, 1410, 84.99, 1935), (312, 312, 156, None)),
    "A100-SXM-40GB": ((108, 1410, 42.29, 1555), (312, 312, 156, None)),
    "A10": ((72, 1695, 23.65, 600), (124.8, 124.8, 62.4, None)),
    "A30": ((56, 1440, 25.26, 933), (165, 165, 82, None)),
    "A40": ((84, 1740, 47.67, 696), (149.7, 149.7, 74.8, None)),
    "H100-SXM": ((132, 1830, 84.94, 3350), (989, 989, 494.5, 1979)),
    "H100-PCIe": ((114, 1755, 84.94, 2000), (756, 756, 378, 1513)),
    "H100-NVL": ((132, 1776, 99.85, 3938), (835.5, 835.5, 417.75, 1671)),
    "H200-NVL": ((132, 1776, 150.1, 4800), (835.5, 835.5, 417.75, 1671)),
    "GH200": ((132, 1983, 101.87, 4000), (989.5, 989.5, 494.75, 1979)),
    "H200": ((132, 1830, 150.1, 4800), (989, 989, 494.5, 1979)),
    "H800": ((132, 1830, 84.94, 3350), (989, 989, 494.5, 1979)),
    "H20": ((78, 1830, 96, 4000), (148, 148, 74, 296)),
    "B200": ((148, 1965, 191.5, 7700), (2250, 2250, 1100, 4500)),
    "GB200": ((152, 2062, 186, 8000), (2500, 2500, 1250, 5000)),
    "B300": ((148, 2032, 270, 7700), (2250, 2250, 1125, 4500)),
    "GB300": ((152, 2032, 279, 8000), (2500, 2500, 1250, 5000)),
    "Rubin": ((224, 2032, 288, 22000), (4000, 4000, 2000, 17500)),
    "RTX-3090": ((82, 1695, 25.29, 936), (71.2, 71.2, 35.6, None)),
    "RTX-4090": ((128, 2520, 25.25, 1008), (165.2, 165.2, 82.6, 330.4)),
    "RTX-5090": ((170, 2407, 33.67, 1792), (209.6, 209.6, 104.8, 838.4)),
    "RTX-A6000": ((84, 1800, 48, 768), (154.8, 154.8, 77.4, None)),
    "RTX-6000-Ada": ((142, 2505, 47.7, 960), (364.4, 364.4, 182.2, 728.8)),
    "RTX-PRO-6000": ((188, 2493, 101.97, 1597), (480, 480, 240, 960)),
    "L4": ((58, 2040, 23.65, 300), (121, 121, 60, 242.5)),
    "L40": ((142, 2490, 47.67, 864), (181, 181, 90.5, 362)),
    "L40S": ((142, 2520, 47.69, 864), (362.05, 362.05, 183, 733)),
    "V100": ((80, 1530, 34.08, 900), (None, 125, None, None)),
    "T4": ((40, 1590, 15.63, 320), (None, 65, None, None)),
    "MI250X": ((110, 1700, 68.69, 1638.4), (191.5, 191.5, None, None)),
    "MI300X": ((304, 2100, 206.1, 5300), (1307.4, 1307.4, 653.7, 2614.9)),
    "MI325X": ((304, 2100, 274.85, 6000), (1307.4, 1307.4, 653.7, 2614.9)),
    "MI355X": ((256, 2400, 309.21, 8000), (2516.6, 2516.6, None, 5033.2)),
    "TPU-v5p": ((2, 1750, 95, 2765), (459, None, 153, None)),
    "TPU-v6e": ((1, 1750, 32, 1640), (918, None, 306, None)),
    "Gaudi-3": ((64, 1750, 128, 3670), (1835, None, None, 1835)),
    "Ascend-910B": ((20, 1910, 64, 1600), (313, 313, None, None)),
    "Ascend-910C": ((24, 1910, 64, 1600), (376, 376, None, None)),
    "Trainium2": ((8, 2545, 103.08, 2900), (667, 667, 667, 1299)),
}
DTYPES = ("bfloat16", "float16", "tfloat32", "float8_e4m3fn")


@pytest.mark.parametrize("name", gpu_names())
def test_datasheet_figures(name: str):
    gpu = load_gpu(name)
    (sms, mhz, gigabytes, bandwidth), rates = PEAKS[name]
    assert gpu.sm_count == sms
    assert gpu.clock_hz == mhz * 1e6
    assert gpu.memory_bytes == round(gigabytes * 10**9)
    assert gpu.peak_bandwidth_bytes_per_s == bandwidth * 1e9
    in_flops = tuple(rate and rate * 1e12 for rate in rates)
    assert tuple(gpu.peak_tensor_flops_per_s(dtype) for dtype in DTYPES) == in_flops


def test_what_an_h100_sustains():
    gpu = load_gpu("H100")
    assert gpu.bandwidth_bytes_per_s == pytest.approx(3350e9 * 0.865)
    assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx(989e12 * 0.737)
    assert gpu.tensor_flops_per_s("float16") == pytest.approx(989e12 * 0.737)  # the default
    assert gpu.tensor_flops_per_s("float8_e5m2") == pytest.approx(1979e12 * 0.754)
    assert gpu.tensor_flops_per_s("tfloat32") == pytest.approx(494.5e12 * 0.737)
    assert gpu.tensor_flops_per_s("float32") == gpu.vector_flops_per_s
    assert gpu.vector_flops_per_s == pytest.approx(67e12 * 0.759)
    assert gpu.tensor_flops_per_s("float64") == pytest.approx(67e12 * 0.737)
    assert gpu.tensor_flops_per_s("float4_e2m1fn_x2") is None
    assert gpu.tensor_flops_per_s("int64") is None
    assert gpu.launch_floor_ns == 2690
    assert gpu.l2_bytes == 52_430_000  # 50 MiB
    assert (gpu.tdp_w, gpu.idle_w) == (700, 123)
    assert gpu.figures["link_bandwidth_gb_per_s"].value == 450
    assert gpu.figures["link_latency_ns"].value == 830


def test_only_gpus_in_the_measurements_claim_the_datasets_gemm_ceiling():
    figures = {name: load_gpu(name).figures.get("bf16_sustained_fraction") for name in gpu_names()}
    of_dataset = {n: one.value for n, one in figures.items() if one and one.source == "gemm"}
    assert of_dataset == {
        "A100-SXM-80GB": 0.794,
        "B200": 0.646,
        "H100-SXM": 0.737,
        "H200": 0.708,
        "L40S": 0.539,
    }


def test_matmuls_in_float32_use_matrix_units_where_there_are_some():
    gpu = load_gpu("MI250X")
    assert gpu.peak_tensor_flops_per_s("float32") == pytest.approx(47.85e12)
    assert gpu.vector_flops_per_s == pytest.approx(23.95e12 * 0.85)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        # products without a description: nothing rather than a relative
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", None),
    ],
)
def test_the_driver_name_finds_the_gpu(reported: str, name: str | None):
    gpu = find_gpu(reported)
    assert (gpu and gpu.name) == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [("a100", "A100-SXM-80GB"), ("h100_sxm", "H100-SXM"), ("rtx pro 6000", "RTX-PRO-6000")],
)
def test_case_dashes_underscores_and_spaces_do_not_matter(typed: str, name: str):
    assert load_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "neighbours"),
    [
        ("H1000", "H100-SXM, H100-NVL, H100-PCIe?"),
        ("A100-80", "A100-SXM-80GB, A100-SXM-40GB, A100-PCIe-80GB?"),
        ("MI300", "MI300X, B300, GB300?"),
        ("", ""),
        ("abacus", ""),
    ],
)
def test_an_unknown_gpu_names_its_neighbours(typed: str, neighbours: str):
    with raises_code("gpu-unknown", naming=(f'"{typed}"', neighbours, "onerank gpus")) as error:
        load_gpu(typed)
    assert ("?" in str(error.value)) == bool(neighbours)


def test_a_description_of_the_user(tmp_path: Path):
    gpu = load_gpu(str(DATA / "x1.toml"))
    assert isinstance(gpu, Gpu)
    assert (gpu.name, gpu.aliases) == ("X1", ())
    assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx(989e12 * 0.73)
    assert gpu.tensor_flops_per_s("float16") is None
    assert gpu.vector_flops_per_s is None
    assert gpu.l2_bytes is None
    assert find_gpu("X1") is None
    without_suffix = tmp_path / "mine"
    without_suffix.write_bytes((DATA / "x1.toml").read_bytes())
    assert load_gpu(str(without_suffix)) == gpu


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_description_says_what_is_wrong(path: Path):
    code, *names = path.read_text().splitlines()[0].removeprefix("# expect: ").split(" | ")
    with raises_code(code, TargetError, naming=(f"{path}: ", *names)):
        load_gpu(path)


def test_a_path_that_cannot_be_read(tmp_path: Path):
    absent = tmp_path / "absent.toml"
    with raises_code("file-unreadable", naming=(str(absent),)):
        load_gpu(str(absent))
    latin = tmp_path / "latin.toml"
    latin.write_bytes('name = "é"'.encode("latin-1"))
    with raises_code("file-not-utf8", naming=("latin.toml", "byte 8")):
        load_gpu(latin)


MEASURED = """
measured_gemm_tflops = {{ value = {gemm}, source = "made", confidence = "measured" }}
measured_copy_gb_per_s = {{ value = {copy}, source = "made", confidence = "measured" }}
"""


def test_two_microbenchmarks_calibrate_the_fractions(gpu_file):
    path = gpu_file(sustained=0.9, achievable=0.8)
    assert not load_gpu(path).calibrated
    with open(path, "a", encoding="utf-8") as file:
        file.write(MEASURED.format(gemm=62, copy=910))
    gpu = load_gpu(path)
    assert gpu.calibrated
    assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx((90e12 * 62e12) ** 0.5)
    assert gpu.bandwidth_bytes_per_s == 910e9
    assert gpu.vector_flops_per_s == 10e12


@pytest.mark.parametrize(
    ("gemm", "copy", "refusal"),
    [
        (101, 900, ("gpu-figure-above-peak", "measured_gemm_tflops", "bf16_tensor_tflops = 100")),
        (62, 1001, ("gpu-figure-above-peak", "1001", "memory_bandwidth_gb_per_s = 1000")),
        (62, 9.1e11, ("gpu-figure-out-of-range", "measured_copy_gb_per_s", "10 to 100000")),
    ],
)
def test_a_measurement_above_the_peak_is_refused(gpu_file, gemm, copy, refusal):
    code, *names = refusal
    path = gpu_file()
    with open(path, "a", encoding="utf-8") as file:
        file.write(MEASURED.format(gemm=gemm, copy=copy))
    with raises_code(code, naming=(str(path), *names)):
        load_gpu(path)


class TestWhatIf:
    def test_a_figure_is_set(self):
        gpu = with_figures(load_gpu("H200"), {"memory_bandwidth_gb_per_s": 6000})
        assert gpu.peak_bandwidth_bytes_per_s == 6e12
        assert gpu.name == "H200 (memory_bandwidth_gb_per_s=6000)"
        assert with_figures(gpu, {}) is gpu
        assert with_figures(gpu, {"memory_bandwidth_gb_per_s": 6000, "l2_mb": 52.43}) is gpu
        assert with_figures(gpu, {"tdp_w": 500}).as_described == load_gpu("H200")

    def test_the_highest_clock_rises_with_the_boost_clock(self):
        gpu = load_gpu("H200")
        assert (gpu.clock_hz, gpu.max_clock_hz) == (1.83e9, 1.98e9)
        assert with_figures(gpu, {"boost_clock_mhz": 3660}).max_clock_hz == 3.96e9
        assert load_gpu("A100").max_clock_hz == load_gpu("A100").clock_hz == 1.41e9

    def test_what_was_measured_stays_the_same_part_of_a_peak(self):
        """A description with two microbenchmarks: else a faster memory would change nothing."""
        measured = {"measured_copy_gb_per_s": 4200, "measured_gemm_tflops": 650}
        gpu = with_figures(load_gpu("H200"), measured)
        fast = with_figures(gpu, {"memory_bandwidth_gb_per_s": 9600, "bf16_tensor_tflops": 1978})
        assert fast.bandwidth_bytes_per_s == pytest.approx(2 * 4.2e12)
        rate = gpu.tensor_flops_per_s("bfloat16")
        assert rate is not None
        assert fast.tensor_flops_per_s("bfloat16") == pytest.approx(2 * rate)
        replaced = with_figures(
            gpu, {"memory_bandwidth_gb_per_s": 9600, "measured_copy_gb_per_s": 5000}
        )
        assert replaced.bandwidth_bytes_per_s == 5e12
        worse = with_figures(gpu, {"memory_achievable_fraction": 0.5})
        assert worse.bandwidth_bytes_per_s == pytest.approx(2.4e12)
        capped = with_figures(gpu, {"bf16_sustained_fraction": 0.5})
        assert capped.tensor_flops_per_s("bfloat16") == pytest.approx(989e12 / 2)

    @pytest.mark.parametrize(
        ("figure", "value", "code", "names"),
        [
            (
                *("memory_bandwidth_gb_per_s", 4.8e12, "gpu-figure-out-of-range"),
                ("4.8e+12", "10 to 100000"),
            ),
            ("sm_count", 0, "gpu-figure-out-of-range", ("is 0", "1 to 2048")),
            ("sm_count", 131.5, "gpu-sm-count", ("131.5",)),
            ("memory_bandwith_gb_per_s", 1, "gpu-unknown-key", ("memory_bandwidth_gb_per_s",)),
            ("l2_mb", float("nan"), "gpu-figure-out-of-range", ("nan", "0.1 to 10000")),
            ("idle_w", 900, "gpu-idle-power", ("is 900", "tdp_w", "700")),
        ],
    )
    def test_what_cannot_be_is_refused(self, figure, value, code, names):
        with raises_code(code, naming=(figure, *names)):
            with_figures(load_gpu("H200"), {figure: value})


DATASHEET = """
name = "D1"
vendor = "NVIDIA"
architecture = "{architecture}"
[sources]
sheet = "round figures for tests"
[figures]
sm_count = {{ value = 132, source = "sheet" }}
boost_clock_mhz = {{ value = 2000, source = "sheet" }}
memory_gb = {{ value = 80, source = "sheet" }}
memory_bandwidth_gb_per_s = {{ value = 4000, source = "sheet" }}
{peaks}
"""
BF16 = "bf16_tensor_tflops = { value = 1000, source = 'sheet' }"
TDP = "tdp_w = { value = 700, source = 'sheet' }"


class TestDatasheetAlone:
    @staticmethod
    def load(path: Path, *peaks: str, architecture: str = "hopper") -> Gpu:
        path = path / "d1.toml"
        text = DATASHEET.format(architecture=architecture, peaks="\n".join(peaks))
        path.write_text(text, encoding="utf-8")
        return load_gpu(path)

    def test_measured_figures_are_estimated_from_measured_gpus(self, tmp_path: Path):
        gpu = self.load(tmp_path, BF16, TDP)
        # means over ampere, hopper (of H100 and H200) and blackwell
        assert gpu.bandwidth_bytes_per_s / 4e12 == pytest.approx(
            (0.86 + (0.865 + 0.856) / 2 + 0.904) / 3
        )
        # The floor is that of Hopper, at another clock.
        assert gpu.launch_floor_ns == round((2690 + 2640) / 2 * (1.83 / 2.0) ** (2 / 3))
        # cube roots of watts per TFLOPS and GHz^2
        h100, h200 = (f / (700 / 989 / 1.83**2) ** (1 / 3) for f in (0.737, 0.708))
        b200 = 0.646 / (1000 / 2250 / 1.965**2) ** (1 / 3)
        share = (700 / 1000 / 2.0**2) ** (1 / 3)
        fraction = ((h100 + h200) / 2 + b200) / 2 * share
        assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx(1e15 * fraction)
        assert gpu.by_datasheet
        assert not gpu.calibrated
        assert {f.confidence for f in gpu.figures.values()} == {"datasheet", "estimated"}
        assert not load_gpu("H100").by_datasheet

    def test_without_a_power_limit_the_fraction_is_the_mean(self, tmp_path: Path):
        gpu = self.load(tmp_path, BF16)
        mean = (0.794 + 0.539 + (0.737 + 0.708) / 2 + 0.646) / 4
        assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx(1e15 * mean)

    def test_what_is_given_is_not_estimated(self, tmp_path: Path):
        fraction = "tensor_sustained_fraction = { value = 0.5, source = 'sheet' }"
        gpu = self.load(tmp_path, BF16, TDP, fraction)
        assert gpu.tensor_flops_per_s("bfloat16") == 5e14
        assert gpu.by_datasheet  # bandwidth and floor are
        override = {"fp32_vector_tflops": 60.0}
        assert with_figures(gpu, override).vector_flops_per_s == pytest.approx(
            60e12 * (0.95 + 0.759 * 2) / 3
        )

    def test_fractions_are_those_of_the_sort_of_die(self, tmp_path: Path):
        """Dies for graphics have GDDR memory and other vector units."""
        gpu = self.load(tmp_path, BF16, TDP, architecture="turing")
        assert gpu.figures["memory_achievable_fraction"].value == 0.843
        override = {"fp32_vector_tflops": 60.0}
        assert with_figures(gpu, override).vector_flops_per_s == pytest.approx(60e12 * 0.637)

    def test_an_unknown_architecture_is_refused(self, tmp_path: Path):
        with raises_code("gpu-architecture-unknown", naming=('"hoper"', "hopper?")):
            self.load(tmp_path, BF16, architecture="hoper")
        assert self.load(tmp_path, BF16, architecture="other").architecture == "other"


def test_the_example_of_a_gpu_that_does_not_exist_loads():
    gpu = load_gpu(Path(__file__).parents[3] / "examples" / "gpus" / "imaginary.toml")
    assert gpu.peak_bandwidth_bytes_per_s == 2 * load_gpu("H200").peak_bandwidth_bytes_per_s


def test_the_example_of_a_datasheet_is_near_the_measured_gpu():
    gpu = load_gpu(Path(__file__).parents[3] / "examples" / "gpus" / "datasheet.toml")
    assert gpu.by_datasheet
    sustained = load_gpu("H100-PCIe").tensor_flops_per_s("bfloat16")
    assert gpu.tensor_flops_per_s("bfloat16") == pytest.approx(sustained, rel=0.05)
