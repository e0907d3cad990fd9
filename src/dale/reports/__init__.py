"""Reports: run folders -> one HTML page, figures and tables. Reads files only; torch is never imported."""
