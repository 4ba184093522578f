"""The documents, and the scripts that keep their generated parts up to date. No part of the installed package.

python -m docs.make_gallery           tables, figures and command outputs of schedules.md
python -m docs.make_architecture      figures and memory table of architecture.md
"""
