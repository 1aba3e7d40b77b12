"""How figures are told: percent or plain, and which of two is better."""

from hyperbloom.common.metrics import axis_of, figure, scale_of, title_of


def test_shares_are_percent_and_errors_are_better_when_small() -> None:
    auroc, rmse, own = scale_of("auroc/3"), scale_of("rmse"), scale_of("deviance-of-ours")
    assert (auroc.factor, auroc.show(93.25), auroc.worst([50.0, 60.0])) == (100.0, "93.2 %", 50.0)
    assert (rmse.factor, rmse.show(54.321), rmse.worst([5.0, 6.0]), rmse.best([5.0, 6.0])) == (1.0, "54.32", 6.0, 5.0)
    assert (own.percent, own.rises) == (False, True)


def test_numbers_have_four_digits_and_no_exponent() -> None:
    assert [figure(value) for value in (58443.6, 999.96, 54.321, 0.5, 0.0, -0.00001, 6)] == [
        *("58,444", "1,000", "54.32", "0.5000", "0.000", "-1.000e-05", "6.000"),
    ]
    assert [scale_of(name).cell(58.444, 2) for name in ("accuracy", "rmse")] == ["58.44", "58.44"]
    assert scale_of("rmse").show(float("nan")) == "nan"


def test_names_are_written_as_people_write_them() -> None:
    assert [title_of(name) for name in ("auroc", "r2", "iou", "balanced-accuracy", "auroc/3", "dice/1")] == [
        *("AUROC", "R2", "IoU", "balanced accuracy", "AUROC/3", "Dice/1"),
    ]
    assert (axis_of("accuracy"), axis_of("mae")) == ("test accuracy, %", "test MAE")
