"""A row of a kernel database, for tests to change."""

from onerank.annotate.kernel_db.database import KernelRow

ROW = KernelRow(
    gpu="NVIDIA H200",
    operator="aten::mm",
    shapes=((4096, 1024), (1024, 4096)),
    dtypes=("bfloat16", "bfloat16"),
    attributes="{}",
    layout='{"1":[1,1024]}',
    kernels=("nvjet_sm90_tst_128x256_TNT",),
    kernel_ns=(44100,),
    median_ns=45000,
    p10_ns=44000,
    p90_ns=47000,
    samples=20,
    l2="cold",
    sm_clock_mhz=1900,
    power_w=640.5,
    temperature_c=50,
    energy_mj=28.8,
    torch="2.11.0",
    cuda="13.0",
    cudnn="9.1",
    driver="580.1",
    triton="3.6.0",
    date="2026-11-21T15:00:00Z",
)
