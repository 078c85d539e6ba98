"""Pass the package metadata of settings.ini to setuptools."""

from configparser import ConfigParser
from pathlib import Path
from shlex import split

from setuptools import find_packages, setup

root = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(root / "settings.ini", encoding="utf-8")
facts = ini["DEFAULT"]
extras = {k.removesuffix("_requirements"): split(v) for k, v in facts.items() if k.endswith("_requirements")}
setup(
    name=facts["lib_name"],
    version=facts["version"],
    description=facts["description"],
    license=facts["license"],
    author=facts["author"],
    url=facts["git_url"],
    project_urls={"Documentation": facts["documentation_url"]} if facts["documentation_url"] else {},
    keywords=facts["keywords"].split(),
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=f">={facts['min_python']}",
    classifiers=[f"Programming Language :: Python :: {version}" for version in facts["tested_pythons"].split()],
    install_requires=split(facts["requirements"]),
    extras_require=extras,
    packages=find_packages(include=[facts["lib_path"] + "*"]),
    package_data={facts["lib_path"]: split(facts["package_data"])},
    entry_points={"console_scripts": split(facts["console_scripts"])},
)
