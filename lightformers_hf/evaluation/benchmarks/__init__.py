"""What is measured on request: conversion, architectures, engines."""
