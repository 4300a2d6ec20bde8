import pytest
import ranks
from collective_checks import judge

pytestmark = pytest.mark.jittor

_FACTS = """
import jittor as jt
from collective_checks import Checks
facts = Checks(here, jt.array, lambda tensor: tensor.numpy()).facts()
leaf = jt.ones(4)
other = jt.ones(4)
xd.all_reduce([leaf, other], in_place=True)
loss = (leaf * leaf).sum()
facts["of_autograd"] = [leaf.tolist(), jt.grad(loss, leaf).tolist()]
xd.destroy()
report(**facts)
"""


def test_collectives_on_ranks_give_what_numpy_gives_within_one_bucket(tmp_path):
    for facts in ranks.run("jittor", _FACTS, tmp_path, ranks=2, limit=600):
        judge(facts, 2)
        assert facts["of_autograd"] == [[2] * 4, [4] * 4]
