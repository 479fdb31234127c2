"""Files of runs and corpora: on this machine, and mirrored in buckets."""
