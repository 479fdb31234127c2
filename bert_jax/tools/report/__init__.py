"""Reports: a page that explains a run, or compares several runs."""
