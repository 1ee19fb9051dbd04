//! Why TLS can't be set up.

use std::{fmt, io, path::PathBuf, sync::Arc};

use jiff::Timestamp;
use rustls::pki_types::pem;
use x509_parser::{nom, prelude::X509Error};

/// TLS can't be set up. Each message says what to do; what the system or a library said is the source.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// One file of the pair is there and the other is not.
    #[error(
        "{} is there but {} is not: both must be there, or neither for a development certificate to be made",
        .there.display(), .missing.display()
    )]
    HalfMissing {
        /// The one that is there.
        there: PathBuf,
        /// The one that is not.
        missing: PathBuf,
    },
    /// A file is there and can't be read.
    #[error("can't read {}: check that the user that runs tollgate may read it", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is damaged PEM.
    #[error("{} is damaged: it must be PEM, text between BEGIN and END lines", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        source: pem::Error,
    },
    /// A file holds nothing of what it is for.
    #[error("there is no {expected} in {}: it must be PEM with a `-----BEGIN …` line{hint}", .path.display())]
    Absent {
        /// The file.
        path: PathBuf,
        /// What it is for.
        expected: Section,
        /// What it seems to hold instead.
        hint: Hint,
    },
    /// The certificate can't be parsed.
    #[error("the first certificate in {} can't be parsed: make or copy it again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: nom::Err<X509Error>,
    },
    /// The certificate's life is over.
    #[error("the certificate in {} expired at {at}: renew it{}", .path.display(), if *.development {
        ", or remove it and its key for a new development certificate to be made"
    } else {
        ""
    })]
    Expired {
        /// The file.
        path: PathBuf,
        /// When.
        at: Timestamp,
        /// Whether Tollgate made it.
        development: bool,
    },
    /// The certificate's life has not begun.
    #[error("the certificate in {} is not valid before {from}: check this machine's clock, or renew it", .path.display())]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// When it begins.
        from: Timestamp,
    },
    /// The key is not the certificate's.
    #[error(
        "the key in {} does not belong to the first certificate in {}: give the key that the certificate was made \
         with, and put the server's own certificate before those that signed it",
        .private_key.display(), .certificate.display()
    )]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        private_key: PathBuf,
    },
    /// rustls refuses the certificate or the key.
    #[error("can't speak TLS with the key in {}: use an ECDSA, Ed25519 or RSA key of 2048 bits or more", .path.display())]
    Unsuitable {
        /// The key's file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// A certificate to trust can't be used as one.
    #[error("a certificate in {} can't be trusted as a root: remove it, or make it again as X.509 version 3", .path.display())]
    BadRoot {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// An upstream's certificates can't be used.
    #[error("upstream `{name}`: {source}")]
    Upstream {
        /// The upstream.
        name: Arc<str>,
        /// Why.
        source: Box<Self>,
    },
    /// No certificate can be for this name.
    #[error(
        "`{name}` is no name that a certificate can be for: write another host into the URL, or a `server_name`"
    )]
    ServerName {
        /// The name.
        name: String,
    },
    /// The system trusts no certificate at all.
    #[error(
        "this system has no root certificates to judge upstreams by: install its `ca-certificates` package, or name a \
         PEM file in the upstream's `ca_file` or in SSL_CERT_FILE"
    )]
    NoRoots {
        /// The first of the errors that were met.
        source: Option<rustls_native_certs::Error>,
    },
    /// The development certificate can't be made.
    #[error("can't make a development certificate for {}", .path.display())]
    Make {
        /// Where it would have been.
        path: PathBuf,
        /// Why.
        source: rcgen::Error,
    },
    /// The development certificate can't be kept.
    #[error(
        "can't write a development certificate into {}: make the folder writable for the user that runs tollgate, or \
         put a certificate and its key there", .folder.display()
    )]
    Write {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What a PEM file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Certificates.
    Certificate,
    /// A private key.
    Key,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "certificate",
            Self::Key => "private key",
        })
    }
}

/// What a PEM file seems to hold in place of what was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing that is known.
    Nothing,
    /// The other file's contents.
    Swapped,
    /// A key behind a passphrase.
    Encrypted,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "",
            Self::Swapped => " (are the certificate's and the key's file swapped?)",
            Self::Encrypted => " (the key is encrypted: write it out in the clear with `openssl pkey`)",
        })
    }
}
