from pathlib import Path

import nemo_run as run

import nemo_skills


def get_packager(extra_package_dirs=None):
    package = Path(nemo_skills.__file__).parent
    folders = [package, *(Path(folder) for folder in extra_package_dirs or ())]
    return run.PatternPackager(
        include_pattern=[f"{folder}/*" for folder in folders],
        relative_path=[str(folder.parent) for folder in folders],
    )
