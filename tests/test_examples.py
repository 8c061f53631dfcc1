"""The example runs, and shows what it says: the minority lifted, the majority left as it was."""

from examples import planted as example
from fairmt.data import planted

TPR, FPR, SIGNS, KIND = range(4)


def test_fairmt_lifts_the_minority_and_harms_no_one(capsys):
    people, others = planted(8_000, seed=0), planted(20_000, seed=1)
    plain = example.rates(example.train(people, fair=False), others)
    fair = example.rates(example.train(people, fair=True), others)
    for number in (TPR, FPR, SIGNS, KIND):
        before, after = (abs(table["majority"][number] - table["minority"][number]) for table in (plain, fair))
        assert after < before / 2
    for group in ("majority", "minority"):
        for number in (SIGNS, KIND):
            assert fair[group][number] > plain[group][number] - 1
    assert "epoch 40 of 40" in capsys.readouterr().out
