"""Fashion-MNIST: 60,000 + 10,000 images of clothing, four idx files (Xiao, Rasul, Vollgraf; Zalando)."""

from pathlib import Path

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._idx import read_pairs
from dpgrad.data._prepare import OFFICIAL, pixels_to_unit
from dpgrad.data._source import published_at

__all__ = ["CLASSES", "PREPROCESSINGS", "PUBLIC", "REPOSITORY", "SOURCES", "load"]

# The maintainers' own mirror on S3 answers http only; their repository serves the same bytes over https.
REPOSITORY = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"

SOURCES = published_at(
    REPOSITORY, "fashion-mnist",
    ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)  # fmt: skip
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
PREPROCESSINGS = ("default", "raw", "huang2024")
PUBLIC: tuple[str, ...] = (ROW_COUNTS, "the ten classes", "the pixel range 0..255")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Fashion-MNIST as (n, 1, 28, 28): 60,000 training and 10,000 test images, pixels divided by 255.

    "raw" keeps bytes. "huang2024" takes N = 40,000 as Huang et al. print it in Table II; which 40,000 is not printed,
    so the first 40,000 of the training file are taken, a rule that reads nothing.

    >>> load(preprocessing="small")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of fashion-mnist must be one of default, raw, huang2024, got 'small'
    """
    name = "fashion-mnist"
    check_preprocessing(name, preprocessing, PREPROCESSINGS)
    x_train, y_train, x_test, y_test = read_pairs(name, SOURCES, root, rows=(60000, 10000), download=download)
    split, public = OFFICIAL, PUBLIC
    if preprocessing == "huang2024":
        x_train, y_train = x_train[:40000], y_train[:40000]
        split = "first 40,000 of the published train file, published test file"
        public += ("N = 40,000 is printed by Huang et al.; which rows is not, the first are taken",)
    if preprocessing != "raw":
        x_train, x_test = pixels_to_unit(x_train), pixels_to_unit(x_test)
    return Dataset(name, x_train, y_train, x_test, y_test, CLASSES, preprocessing, split, public)
