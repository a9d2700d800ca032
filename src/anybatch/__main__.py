"""`python -m anybatch`"""

from anybatch.cli import main

main()
