"""Which processes of a script are ranks."""

import sys

from onerank.capture.group_creation import creates_group

FILES = {
    "__init__": "",
    "trainer": """
from .groups import start

class Trainer:
    def __init__(self):
        start()

def evaluate():
    pass
""",
    "groups": """
def start():
    import torch.distributed as dist
    dist.init_process_group("nccl")
""",
}
FUNCTIONS = """
def rank():
    from job_of_ranks.trainer import Trainer
    Trainer()

def rank_by_module():
    import job_of_ranks.trainer as trainer
    trainer.Trainer()

def evaluator():
    from job_of_ranks.trainer import evaluate
    evaluate()

def other():
    import json, absent_module
    json.dumps(absent_module)
"""


def test_a_function_that_imports_its_trainer_is_a_rank(tmp_path, monkeypatch):
    (tmp_path / "job_of_ranks").mkdir()
    for name, text in FILES.items():
        (tmp_path / "job_of_ranks" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, object] = {"__name__": "script"}
    exec(FUNCTIONS, namespace)
    ranks = {name for name in namespace if creates_group(namespace[name])}
    assert ranks == {"rank", "rank_by_module"}
    assert "job_of_ranks.trainer" not in sys.modules
