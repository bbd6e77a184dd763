"""Python imports this at its start: processes that tests start are guarded too."""

import only_decoys

only_decoys.install()
