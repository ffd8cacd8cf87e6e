"""One evaluation from plan to summary."""
