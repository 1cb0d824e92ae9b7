"""Graduate Admission: 500 applicants, 7 scores, the chance of admission (Acharya et al. 2019, version 1.1)."""

from pathlib import Path

from dpgrad.data import _table
from dpgrad.data._dataset import Dataset, check_preprocessing
from dpgrad.data._regression import prepare
from dpgrad.data._source import Content, Source, read_all

__all__ = ["BOUNDS", "PREPROCESSINGS", "SOURCES", "load"]

SOURCES = (
    Source(
        "regression",
        "Admission_Predict_Ver1.1.csv",
        "1036ff04d202c84135330f09a6dbf2daa56e4055d1bad04bed5c1ace5d0084f1",
        16177,
        published="https://www.kaggle.com/datasets/mohansacharya/graduate-admissions",
        # Kaggle asks for an account; this public copy is the one the checksum was taken of.
        url="https://raw.githubusercontent.com/SwatantraJain-02/Admission-Prediction/"
        "994c229a9e879738975ba899d97855224dd7ec5e/Admission_Predict_Ver1.1.csv",
        content=Content(
            "69cb3e0b08729d2edd7a47789ad8a05a4a7f5ad6791c6f4b73bb1efb94dc310e",
            _table.rows_below_header,
            "of the rows below the header, with plain line feeds",
        ),
    ),
)
# The scales of the tests and forms themselves.
BOUNDS: tuple[tuple[float, float], ...] = (
    (260, 340),  # GRE score
    (0, 120),  # TOEFL score
    (1, 5),  # university rating
    (1, 5),  # statement of purpose
    (1, 5),  # letter of recommendation
    (0, 10),  # grade point average
    (0, 1),  # research experience
)
PREPROCESSINGS = ("default", "yu2020")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Graduate Admission as (n, 7) and the chance in [0, 1]; the serial number is left out.

    "yu2020" is min-max scaled over all 500 rows: least and average curvature .00668 and .401, Table 2 of the paper.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of graduate-admission must be one of default, yu2020, got 'raw'
    """
    name = "graduate-admission"
    check_preprocessing(name, preprocessing, PREPROCESSINGS)
    (text,) = read_all(name, SOURCES, root, download=download)
    table = _table.parse(text, SOURCES[0].place, rows=500, columns=9)
    return prepare(name, table[:, 1:8], table[:, 8], preprocessing, bounds=BOUNDS, target_bounds=(0, 1))
