//! The binary. What it does is in [`tollgate::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    tollgate::cli::main()
}
